"""What training a draft head needs: targets, labels, the loop, and β by simulated walks. No Ray, no files."""
