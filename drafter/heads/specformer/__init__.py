"""SpecFormer (Shi et al. 2025, arXiv 2511.20340): a chain of tokens in one forward, for large batches."""
