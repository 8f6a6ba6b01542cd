"""Batch inference on Ray: rows in, the engine in the middle, Parquet out."""

import drafter  # noqa: F401  first of all, because it decides how torch's threads wait
