"""Measurements that answered one question each, with their dates and results; `benchmarks` are run again."""
