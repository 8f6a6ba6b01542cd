"""Measurements, side by side in one process; results are committed as JSON in `results`."""
