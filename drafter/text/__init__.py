"""Converts between text and tokens: chat templates, detokenisation, stop strings."""
