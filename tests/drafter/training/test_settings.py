from __future__ import annotations

import math

import pytest

from drafter.training.settings import TrainingSettings


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine() -> None:
    settings = TrainingSettings(steps=100, learning_rate=2.0, warmup_steps=10, final_learning_rate=0.1)
    assert settings.learning_rate_at(0) == pytest.approx(0.2)
    # Half of the warm-up, times the cosine, which falls from the first step on.
    assert settings.learning_rate_at(4) == pytest.approx(2.0 * 0.5 * (0.1 + 0.9 * (1 + math.cos(0.04 * math.pi)) / 2))
    assert settings.learning_rate_at(50) == pytest.approx(2.0 * 0.55)
    assert settings.learning_rate_at(75) == pytest.approx(2.0 * (0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2))
    assert settings.learning_rate_at(100) == pytest.approx(0.2)
    assert settings.learning_rate_at(500) == pytest.approx(0.2)


def test_without_a_warm_up_it_starts_at_its_highest() -> None:
    assert TrainingSettings(learning_rate=0.5, warmup_steps=0).learning_rate_at(0) == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("texts_per_step", 0),
        ("anchors_per_text", -1),
        ("evaluate_every", 0),
        ("chosen_by", 0),
        ("warmup_steps", -1),
        ("teacher", -1),
        ("final_learning_rate", -0.1),
        ("weight_decay", -0.1),
        ("weight_decay", math.nan),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("clip", 0.0),
        ("teacher_temperature", 0.0),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*, not {value}$"):
        TrainingSettings(**{name: value})  # type: ignore[arg-type]
