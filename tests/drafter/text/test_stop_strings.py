from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter.text.tokenizers import StopSearch, cut_at_stop

FEW = st.text("ab", max_size=6)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


@given(st.lists(FEW, max_size=8), STOPS)
def test_each_piece_tells_what_the_whole_text_would(pieces: list[str], stops: list[str]) -> None:
    search, text = StopSearch(stops), ""
    for piece in pieces:
        search.push(piece)
        text += piece
        assert search.found == any(stop in text for stop in stops)
        if search.found:
            break
        beginnings = [stop[:length] for stop in stops for length in range(len(stop))]
        assert search.held_back == max((len(one) for one in beginnings if text.endswith(one)), default=0)


def test_literal_texts() -> None:
    search = StopSearch(["aab", "x"])
    search.push("caa")
    assert (search.held_back, search.found) == (2, False)
    search.push("a")
    assert (search.held_back, search.found) == (2, False)
    search.push("b")
    assert search.found
    assert cut_at_stop("caaab and x", ["x", "aab"]) == "ca"
    assert cut_at_stop("nothing", ["x"]) == "nothing"
    assert cut_at_stop("nothing", []) == "nothing"


def test_a_string_is_found_in_pieces_that_are_not_shown() -> None:
    search = StopSearch(["<end>", "b<x>"])
    for piece, hidden in (("ab", False), ("<s>", True), ("c", False), ("<en", False)):
        search.push(piece, hidden=hidden)
        assert search.cut is None
    search.push("<end>", hidden=True)
    assert (search.found, search.cut) == (True, 6)  # of "abc<en"
    search = StopSearch(["b<x>"])
    search.push("<x>", hidden=True)
    search.push("ab")
    search.push("<x>", hidden=True)
    assert search.cut == 1


def test_a_piece_costs_what_is_new() -> None:
    """Characters are compared with the strings, whatever came before them: at most twice each, in all."""
    looked = 0

    class Counted(str):
        def __ne__(self, other: object) -> bool:
            nonlocal looked
            looked += 1
            return str(self) != other

        __hash__ = str.__hash__

    class Wanted(str):
        def __getitem__(self, place: object) -> str:
            return Counted(super().__getitem__(place))  # type: ignore[index]

        __hash__ = str.__hash__

    search = StopSearch([Wanted("a" * 1000 + "b")])
    looked = 0
    for _ in range(3000):
        search.push("a")
    assert not search.found
    assert looked <= 2 * 3000
