"""CTC over draft frames: the exact best trie, the published static tree, and the losses. Pure functions."""
