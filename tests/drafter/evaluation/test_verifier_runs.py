"""Verifiers are decoded beside plain decoding; their tables and plots, of figures written by hand."""

from __future__ import annotations

import math
import weakref
from typing import Any
from unittest.mock import patch

import pytest

from drafter.acceptance.settings import VerifierSettings
from drafter.drafters.contract import PlainDecoding
from drafter.drafters.registry import TRAINING_FREE
from drafter.engine.config import EngineSettings
from drafter.evaluation.measurement import VerifierTrials
from drafter.evaluation.verifiers import (
    EXACT,
    VerifierFigures,
    in_order,
    title_of,
    utility_plot,
    utility_table,
    verifier_grid,
)
from drafter.requests import Request, SamplingParams
from drafter.statistics import DecodeCounts
from drafter.target_model.model import BaseModel
from tests.support.models import AdversarialDrafter, SpellingTokenizer, run_engine, tokens_of


def begun(base: BaseModel, requests: list[Request], engine: EngineSettings, *, rounds: int) -> VerifierTrials:
    trials = VerifierTrials(lambda: (base, SpellingTokenizer()))
    assert trials.load("a command")["command"] == "a command"
    trials.begin("adversarial", engine, requests, rounds)
    return trials


def test_every_verifier_decodes_the_same_requests_beside_plain_decoding(tiny_base: BaseModel) -> None:
    requests = [Request([5, 6, 7 + row], SamplingParams(16, ignore_eos=True)) for row in range(3)]
    expected = tokens_of(run_engine(tiny_base, PlainDecoding(), requests))
    verifiers = [EXACT, VerifierSettings("fly", {"theta": 0.0, "window": 1})]
    config = EngineSettings(max_num_seqs=3, num_draft_tokens=8)
    with patch.dict(TRAINING_FREE, {"adversarial": lambda _: AdversarialDrafter(1)}):
        trials = begun(tiny_base, requests, config, rounds=2)
        made = [trials.run(one) for one in verifiers]
    assert [run.verifier for run in made] == verifiers
    assert made[0].token_ids == expected
    assert made[0].lenient_tokens == 0 < made[1].lenient_tokens
    assert made[1].beta > made[0].beta > 1
    for run in made:
        assert run.gamma > 0
        assert run.texts == [SpellingTokenizer().decode(ids) for ids in run.token_ids]
        assert run.counts.num_output_tokens == 48


def test_the_engine_before_is_gone_when_the_next_is_made(tiny_base: BaseModel) -> None:
    made: list[weakref.ref[AdversarialDrafter]] = []

    def drafter() -> AdversarialDrafter:
        assert [one() for one in made] == [None] * len(made)
        one = AdversarialDrafter(1)
        made.append(weakref.ref(one))
        return one

    requests = [Request([5, 6, 7], SamplingParams(4, ignore_eos=True))]
    with patch.dict(TRAINING_FREE, {"adversarial": lambda _: drafter()}):
        trials = begun(tiny_base, requests, EngineSettings(max_num_seqs=1, num_draft_tokens=8), rounds=1)
        for _ in range(2):
            trials.run(EXACT)
    assert len(made) == 2


def test_a_grid_begins_with_the_strictest_and_has_the_published_setting() -> None:
    thetas = [one.settings.get("theta") for one in verifier_grid(VerifierSettings("fly", {"window": 3}))]
    assert 0.3 in thetas
    assert thetas == sorted(thetas, key=lambda value: -(value or 0))
    assert all(one.settings.get("window") == 3 for one in verifier_grid(VerifierSettings("fly", {"window": 3})))
    sigmas = [one.settings.get("sigma") for one in verifier_grid(VerifierSettings("pad", {"classifier": "folder"}))]
    assert 0.5 in sigmas
    assert verifier_grid(VerifierSettings("fly", {"theta": 0.2})) == [VerifierSettings("fly", {"theta": 0.2})]


def figures(exact: list[float], scores: list[float], beta: int, name: Any = "fly", **given: Any) -> VerifierFigures:
    counts = DecodeCounts(num_output_tokens=10 * beta, num_decode_steps=10)
    run = VerifierFigures(VerifierSettings(name, given), [[1]], ["x"], 3, counts, 3.0)
    return run.scored(exact, scores)


def test_a_table_and_a_plot_tell_what_is_kept_of_utility() -> None:
    right = [1.0] * 8
    found = [
        figures(right, right, 2, "exact"),
        figures(right, right, 2, theta=0.9),
        figures(right, [*right[1:], 0.9], 3, theta=0.5),
        figures(right, [*right[1:], 0.0], 4, theta=0.1),
        figures(right, [*right[1:], 0.0], 5, "pad", sigma=0.5),
    ]
    assert found[3].kept == pytest.approx(7 / 8)
    assert figures([0.0], [0.0], 2, theta=0.1).kept is None
    table = utility_table(found)
    assert "| fly | theta 0.1 | 4.00 | 3.00 | 0.8750 | -0.1250 ± 0.2450 | 87.5% | 3 of 40 |" in table
    assert "| exact |  | 2.00 | 3.00 | 1.0000 |  | 100.0% | 3 of 20 |" in table
    (panel,) = utility_plot(found).axes
    assert [line.get_label() for line in panel.lines[:3]] == ["exact", "fly", "pad"]
    assert panel.lines[1].get_xydata().tolist() == [[2, 1], [3, 0.9875], [4, 0.875]]  # type: ignore[union-attr]
    assert math.isclose(found[1].as_dict()["kept"], 1)


def test_lines_are_of_one_window_and_go_from_strict_to_lenient() -> None:
    one = [1.0]
    found = [
        figures(one, one, 2, "exact"),
        figures(one, one, 4, theta=0.5),
        figures(one, one, 5, theta=0.1, window=12),
        figures(one, one, 3, theta=0.9),
        figures(one, one, 4, theta=0.3, window=12),
        figures(one, one, 5, "pad", sigma=0.7),
        figures(one, one, 3, "pad", sigma=0.1),
    ]
    assert [title_of(each.verifier) for each in in_order(found)] == [
        "exact",
        "fly, theta 0.9",
        "fly, theta 0.5",
        "fly, theta 0.3, window 12",
        "fly, theta 0.1, window 12",
        "pad, sigma 0.1",
        "pad, sigma 0.7",
    ]
    (panel,) = utility_plot(found).axes
    assert [line.get_label() for line in panel.lines] == ["exact", "fly", "fly, window 12", "pad"]
    assert panel.lines[2].get_xydata().tolist() == [[4, 1], [5, 1]]  # type: ignore[union-attr]
    assert panel.lines[1].get_color() == panel.lines[2].get_color() != panel.lines[3].get_color()
    assert panel.lines[1].get_linestyle() != panel.lines[2].get_linestyle()
