"""A learner of whose head there is a new version every few seconds; as a program, `drafter serve` with it."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from drafter.methods.learning import settings
from drafter.methods.learning.settings import LearnerSettings

QUICK: dict[str, Any] = {
    "texts_per_step": 2,
    "anchors_per_text": 4,
    "held_out_share": 0.3,
    "held_out_rows": 4,
    "least_held_out": 1,
    "evaluate_every": 2,
    "least_gain": 1.0,
    "teacher": 0,
}


quick_settings = partial(LearnerSettings, **QUICK)


if __name__ == "__main__":
    from jobs.serve import main

    settings.LearnerSettings = quick_settings  # type: ignore[misc, assignment]
    sys.exit(main())
