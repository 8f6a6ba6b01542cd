"""Staging: converts any input deterministically to Parquet parts of named rows."""
