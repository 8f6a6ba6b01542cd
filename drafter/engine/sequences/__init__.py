"""Sequences: requests under way, who of them is in which slot, and how their prompts are read."""
