"""Staging: any input becomes Parquet parts of named rows, the same parts every time."""
