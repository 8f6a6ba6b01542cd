"""Settings of a learner, and the head that it and the engines start from; without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHIPPED_OR_NEW = "shipped"
"""As `StartingHead.folder`: the head shipped for a target model, or a new one if there is none."""


@dataclass(frozen=True)
class LearnerSettings:
    """Settings of a learner.

    Args:
        buffer_bytes: Memory for training rows.
        uses: Times that a row is trained on at most, at other positions each time.
        held_out_share: Share of the prompts held out for measuring, by a hash of the prompt.
        held_out_rows: Held-out rows at most: the newest ones.
        least_held_out: Held-out rows needed before anything is measured or published.
        texts_per_step: Texts of an optimiser step.
        anchors_per_text: Positions of a text where the head drafts.
        learning_rate: Rate of AdamW after warm-up. Constant, because a job's text may change at any time.
        warmup_steps: Steps of linear warm-up.
        averaging: Weight of the past in the average of the weights, which is what is measured and published.
        teacher: Labels at each position, the target model's likeliest tokens there; 0 for the text alone. A head that
            does not read the LM head's input learns from the text alone.
        evaluate_every: Optimiser steps between two measurements.
        least_gain: A version is published if its acceptance length is so many times that of the one before.
        num_draft_tokens: Draft tokens of the measured trees.
        seed: Of anchors.

    Raises:
        ValueError: A value is out of range.
    """

    buffer_bytes: int = 256 << 20
    uses: int = 8
    held_out_share: float = 0.06
    held_out_rows: int = 24
    least_held_out: int = 4
    texts_per_step: int = 4
    anchors_per_text: int = 24
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    averaging: float = 0.98
    teacher: int = 4
    evaluate_every: int = 100
    least_gain: float = 1.01
    num_draft_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        whole = ("buffer_bytes", "uses", "held_out_rows", "least_held_out", "texts_per_step", "anchors_per_text")
        least = dict.fromkeys((*whole, "evaluate_every", "num_draft_tokens"), 1) | {"warmup_steps": 0, "teacher": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, not {getattr(self, name)}")
        if not 0 < self.held_out_share < 1:
            raise ValueError(f"held_out_share must be between 0 and 1, not {self.held_out_share}")
        if not 0 <= self.averaging < 1:
            raise ValueError(f"averaging must be at least 0 and below 1, not {self.averaging}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be more than 0, not {self.learning_rate}")
        if not self.least_gain >= 1:
            raise ValueError(f"least_gain must be at least 1, not {self.least_gain}")


@dataclass(frozen=True)
class StartingHead:
    """A head by name, or the shape of a new one. Engines and learner must start from the same."""

    folder: str | None = None  # a head's folder or hub id, or the algorithm of an embedded head; None for a new head
    algorithm: str = "ctc"
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of a new head's configuration
    seed: int = 0
    copied_from: str | None = None  # source of the folder if it is a copy; for provenance

    @property
    def drafts(self) -> bool:
        return self.folder is not None
