"""How a learner trains, and the head that it and the engines start from; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHIPPED_OR_NEW = "shipped"
"""As `StartingHead.folder`: the head shipped for a target model, or a new one if there is none."""


@dataclass(frozen=True)
class LearnerSettings:
    """How a learner trains, and when it publishes. Of a job only the learning rate can be chosen."""

    learning_rate: float = 1e-3  # of AdamW after warm-up; constant, because a job's text may change at any time
    warmup_steps: int = 20
    averaging: float = 0.98  # weight of the past in the average of the weights, which is measured and published
    texts_per_step: int = 4
    anchors_per_text: int = 24  # positions of a text where the head drafts
    # Labels at each position, the target model's likeliest tokens there; 0 for the text alone. A head that does not
    # read the LM head's input learns from the text alone.
    teacher: int = 4
    uses: int = 8  # times that a row is trained on at most, at other positions each time
    buffer_bytes: int = 256 << 20  # memory for training rows
    held_out_share: float = 0.06  # share of the prompts held out for measuring, by a hash of the prompt
    held_out_rows: int = 24  # at most: the newest ones
    least_held_out: int = 4  # before anything is measured or published
    evaluate_every: int = 100  # optimiser steps between two measurements
    least_gain: float = 1.01  # a version is published if its acceptance length is so many times that of the one before
    num_draft_tokens: int = 16  # of the measured trees
    seed: int = 0  # of anchors


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
