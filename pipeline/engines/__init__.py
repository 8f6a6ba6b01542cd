"""Engines as Ray actors: rows in, generations out, and what survives when an actor dies."""
