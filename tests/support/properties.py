"""How many examples a property is tried on."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

FAST, WHOLE = "fast", "whole"
"""Hypothesis' profiles of `make test` and of `make test-slow`, which tries each property again, on more examples."""


def register_profiles() -> None:
    """Register both, and load the first."""
    # No deadline: on a busy machine an example takes as long as it takes.
    settings.register_profile(WHOLE, deadline=None)
    settings.register_profile(FAST, deadline=None, max_examples=25)
    settings.load_profile(FAST)


def examples(most: int, **others: Any) -> settings:
    """Return the settings of a property that needs `most` examples; the fast suite tries fewer."""
    whole = settings.get_current_profile_name() != FAST
    return settings(max_examples=most if whole else min(most, settings().max_examples), **others)
