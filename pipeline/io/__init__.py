"""Input files: listing, formats, columns."""
