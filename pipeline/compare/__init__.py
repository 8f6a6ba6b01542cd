"""Two outputs of the same prompts, side by side."""
