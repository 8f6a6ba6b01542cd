"""Searches for the best draft tree under a head's distributions."""
