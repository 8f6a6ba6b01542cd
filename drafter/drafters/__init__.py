"""Drafters that need no training, and the contract that every drafter keeps."""
