"""Verifiers that accept more than equality, for a measured loss of quality; never the default."""
