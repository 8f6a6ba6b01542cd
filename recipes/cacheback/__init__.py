"""A table of n-grams of a corpus, for the drafter cacheback (arXiv 2511.21699)."""
