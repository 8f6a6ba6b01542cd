"""Draft modules: from the base's hidden states to frame states, in training and in decoding."""
