"""Turns of engines that are none: a broken one costs the others nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from benchmarks.peers.cells import Failure
from benchmarks.peers.contenders import REFERENCE, Contender
from benchmarks.peers.environments import PeerError
from benchmarks.peers.rounds import Measured, measure
from benchmarks.peers.workers.protocol import Done, Work

ONE, OTHER = (Contender(name, "plain", name) for name in ("one", "other"))
WORKS = {"short": Work([[3], [4]], 4), "long": Work([[3, 3], [4, 4]], 4)}


@dataclass
class Scripted:
    """Gives the prompts back, and fails from a turn on."""

    name: str
    log: list[str]
    lasts: int = 100
    versions: dict[str, str] = field(default_factory=lambda: {"package": "1.0"})

    def decode(self, work: Work) -> Done:
        self.lasts -= 1
        if self.lasts < 0:
            raise PeerError("it is tired")
        self.log.append(self.name)
        return Done(2.0, [[*prompt, 1] for prompt in work.prompts], 5)

    def close(self) -> None:
        self.log.append(f"{self.name} is closed")


def run(log: list[str], lasts: dict[Contender, int]) -> Measured:
    """Measure three engines in two rounds, each as long as it lasts; at -1 it does not start."""

    def start(contender: Contender, batch: int) -> Scripted:
        if lasts.get(contender) == -1:
            raise PeerError("it does not start")
        return Scripted(contender.engine, log, lasts.get(contender, 100))

    return measure([REFERENCE, ONE, OTHER], start, WORKS, 4, 2, {1})


def test_all_take_turns_in_an_order_that_rotates() -> None:
    log: list[str] = []
    found = run(log, {})
    this = "this engine"
    assert log[:6] == [this, this, "one", "one", "other", "other"]
    assert log[6:18] == [this, "one", "other"] * 2 + ["one", "other", this] * 2
    assert sorted(log[18:]) == ["one is closed", "other is closed", "this engine is closed"]
    assert not found.failures
    assert found.versions["one, plain"] == {"package": "1.0"}
    assert [(cell.contender, cell.context, cell.round) for cell in found.cells[:4]] == [
        ("this engine, none", "short", 0),
        ("one, plain", "short", 0),
        ("other, plain", "short", 0),
        ("this engine, none", "long", 0),
    ]
    assert [(cell.tokens, cell.same, cell.rate) for cell in found.cells[:4]] == [(2, 2, 1.0)] * 3 + [(4, 4, 2.0)]


@pytest.mark.parametrize(("lasts", "reason"), [(-1, "it does not start"), (0, "it is tired"), (4, "it is tired")])
def test_a_broken_one_costs_the_others_nothing(lasts: int, reason: str) -> None:
    found = run([], {ONE: lasts})
    assert found.failures == [Failure("one, plain", 4, reason)]
    assert {cell.contender for cell in found.cells} == {REFERENCE.name, OTHER.name}
    assert len(found.cells) == 8


def test_without_the_reference_there_is_nothing_to_measure() -> None:
    log: list[str] = []
    with pytest.raises(PeerError):
        run(log, {REFERENCE: 3})
    assert sorted(log)[-1] == "this engine is closed"
