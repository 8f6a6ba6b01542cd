"""What a drafter gains, measured in the real engine beside plain decoding and `transformers.generate`. No Ray."""
