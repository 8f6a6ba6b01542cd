"""Training of draft heads: targets, labels, the loop, and β by simulated walks. No Ray and no files."""
