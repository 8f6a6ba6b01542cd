"""Ratios, of figures written by hand."""

from __future__ import annotations

from benchmarks.peers.cells import Cell, Standing, same_tokens, standings, without_end
from benchmarks.peers.contenders import Contender

ABOUT = {
    one.name: one
    for one in (
        Contender("this engine", "none", "this_engine"),
        Contender("swift", "plain", "swift"),
        Contender("slow", "plain", "slow"),
        Contender("slow", "ngram", "slow"),
    )
}


def cell(name: str, turn: int, seconds: float, same: int = 100) -> Cell:
    return Cell(name, "short", 1, turn, seconds, tokens=100, same=same, reference=100, peak_bytes=turn + 7)


def test_the_token_that_ends_a_text_is_left_out() -> None:
    assert without_end([5, 6, 1, 1], {1, 2}) == [5, 6]
    assert without_end([5, 6], {1, 2}) == [5, 6]


def test_tokens_are_the_same_at_the_same_place() -> None:
    assert same_tokens([[1, 2, 3], [4]], [[1, 3, 3], [4, 5]]) == 3


def test_peers_are_compared_within_a_round() -> None:
    """In the second round the machine is at half its speed. The fastest peer is one that speculates."""
    seconds = {"this engine, none": 1.0, "swift, plain": 2.0, "slow, plain": 4.0, "slow, ngram": 0.5}
    cells = [cell(name, turn, one * (1 + turn)) for turn in (1, 0) for name, one in seconds.items()]
    found = standings(cells, ABOUT)
    assert found["this engine, none"] == Standing(75.0, 2.0, 0.5, 1.0, 8)
    assert found["slow, plain"] == Standing(18.75, 0.5, 0.125, 1.0, 8)
    assert found["slow, ngram"] == Standing(150.0, 4.0, 1.0, 1.0, 8)


def test_the_share_of_same_tokens_is_of_all_rounds() -> None:
    cells = [cell("this engine, none", 0, 1.0), cell("slow, plain", 0, 1.0, same=90), cell("slow, plain", 1, 1.0)]
    assert standings(cells[1:], ABOUT)["slow, plain"].same == 0.95


def test_without_a_peer_there_is_nothing_to_compare_with() -> None:
    found = standings([cell("this engine, none", 0, 1.0)], ABOUT)["this engine, none"]
    assert (found.to_plain, found.to_best) == (None, None)
