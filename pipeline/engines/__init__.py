"""Engines as Ray actors: parts in, generated rows out, with records that survive the death of an engine's process."""
