"""Measures what a drafter gains: this project's engine beside plain decoding and `transformers.generate`. No Ray."""
