"""The output of a job: its layout, atomic commits, and summaries."""
