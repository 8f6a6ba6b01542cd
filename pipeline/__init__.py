"""Batch inference on Ray: rows in, the engine in the middle, Parquet out."""
