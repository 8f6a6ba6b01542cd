"""Verifiers: how the base's logits decide which draft tokens become output."""
