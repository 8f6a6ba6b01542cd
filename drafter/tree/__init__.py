"""Draft trees, which drafters propose and verifiers read."""
