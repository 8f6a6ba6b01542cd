"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer that drafts token by token from its own outputs."""
