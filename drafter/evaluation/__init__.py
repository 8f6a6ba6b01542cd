"""Measures a drafter's speed: this project's engine beside plain decoding and `transformers.generate`. No Ray."""
