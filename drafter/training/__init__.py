"""What one training step of a draft head needs: targets, objectives, and β by simulated walks. No Ray, no files."""
