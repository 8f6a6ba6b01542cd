"""Configurations to start from, and a demonstration on several nodes."""
