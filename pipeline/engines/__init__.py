"""Engines as Ray actors: parts in, generated rows out, and what survives when an engine's process dies."""
