from __future__ import annotations

from typing import Any

import pytest

from drafter.drafters.contract import MeasuredWorth
from drafter.drafters.registry import load_drafter
from drafter.embedded import EMBEDDED_BASE
from drafter.heads.contract import Provenance, measured_worth
from drafter.target_model.loading import load_base


def training(beta: Any) -> Provenance:
    return Provenance("base", "v2-0", {"history": [{"beta": {"8": 1.0}}, {"step": 2, "beta": beta}]})


def test_a_head_is_worth_what_its_last_evaluation_says() -> None:
    assert measured_worth(training({"16": 3.5, "8": 2.5})) == MeasuredWorth((8, 16), (1.5, 2.5))


@pytest.mark.parametrize(
    "beta", [{}, {"8": 0.5}, {"8": 99.0}, {"0": 1.0}, {"8": float("nan")}, {"many": 2.0}, {"8": None}, [8, 2.0], 3, "β"]
)
def test_an_origin_that_says_nothing_sensible_says_nothing(beta: Any) -> None:
    assert measured_worth(training(beta)) is None


@pytest.mark.parametrize("origin", [None, Provenance("base", "v2-0"), Provenance("base", "v2-0", {"history": []})])
def test_a_head_without_evaluations_says_nothing(origin: Provenance | None) -> None:
    assert measured_worth(origin) is None


def test_the_embedded_head_ships_with_its_worth() -> None:
    base = load_base(str(EMBEDDED_BASE))
    known = load_drafter("ctc", base, 15).worth
    assert known is not None
    assert 3.0 < known.accepted[0] < known.accepted[-1] < 10.0
    automatic = load_drafter("auto", base, 15)
    assert {name: member.worth for name, member in automatic.members.items()} == {
        "head": known,
        "cacheback": None,
        "memory": None,
        "head+cacheback": known,
    }
