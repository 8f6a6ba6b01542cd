"""Measurements whose results are committed, in `results`: raw figures as JSON, and what is made of them."""
