"""What a target model's language model gets of a prompt with images: its own forward, up to there."""

from __future__ import annotations
