from __future__ import annotations

import numpy as np
import pytest

from drafter.evaluation.intervals import bootstrap, sign_test


@pytest.mark.parametrize(
    ("successes", "trials", "probability"), [(0, 4, 0.125), (4, 4, 0.125), (2, 4, 1.0), (1, 8, 18 / 256), (0, 0, 1.0)]
)
def test_a_sign_test_is_two_sided(successes: int, trials: int, probability: float) -> None:
    assert sign_test(successes, trials) == pytest.approx(probability)


def test_about_95_of_100_intervals_hold_the_true_figure() -> None:
    """A ratio of sums, of prompts that differ in length and acceptance."""
    generator, held = np.random.default_rng(1), 0
    for _ in range(100):
        steps = generator.integers(10, 60, size=30)
        tokens = steps + generator.poisson(0.8 * steps)
        interval = bootstrap(range(30), lambda picked, t=tokens, s=steps: float(t[picked].sum() / s[picked].sum()))  # type: ignore[misc]
        assert interval is not None
        held += interval[0] <= 1.8 <= interval[1]
    assert 88 <= held <= 100


def test_an_interval_is_the_same_each_time_and_needs_some_prompts() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    found = [bootstrap(range(5), lambda picked: float(values[picked].mean())) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0] is not None
    assert 1.0 < found[0][0] < values.mean() < found[0][1] < 16.0
    assert bootstrap(range(4), lambda picked: float(values[picked].mean())) is None


def test_prompts_of_a_question_come_and_go_together() -> None:
    """Samples and turns of a question are alike: six answers to one question are no six questions."""
    few = np.repeat([1.0, 2.0, 4.0, 8.0, 16.0], 6)
    questions = np.repeat([3, 1, 4, 0, 2], 6).tolist()
    assert bootstrap([0] * 6, lambda picked: float(few[picked].mean())) is None
    found = bootstrap(questions, lambda picked: float(few[picked].mean()))
    apart = bootstrap(range(len(few)), lambda picked: float(few[picked].mean()))
    assert found is not None
    assert apart is not None
    assert found[1] - found[0] > 1.8 * (apart[1] - apart[0])
    assert bootstrap(questions, lambda picked: float(len(picked))) == (30, 30)
