"""Draft heads: drafters with trained weights."""
