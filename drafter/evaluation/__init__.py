"""Measures a drafter's speed beside plain decoding in the same engine. No Ray."""
