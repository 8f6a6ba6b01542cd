"""Each engine gets what the others have said since it looked last, once, and never its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.engines.shared_texts import NodeTexts, Seen


def exchange(
    node: NodeTexts, engine: str, said: Sequence[list[int]], seen: Seen | None
) -> tuple[list[list[int]], Seen]:
    texts, now = node.exchange(engine, [np.array(text, np.int32) for text in said], seen)
    return [text.tolist() for text in texts], now


def test_each_gets_what_the_others_have_said() -> None:
    node = NodeTexts()
    assert exchange(node, "a", [[1]], None)[0] == []
    seen_a, seen_b = exchange(node, "a", [], None)[1], exchange(node, "b", [], None)[1]
    told, seen_a = exchange(node, "a", [[2], [3]], seen_a)
    assert told == []
    told, seen_b = exchange(node, "b", [[4]], seen_b)
    assert told == [[2], [3]]
    assert exchange(node, "b", [], seen_b)[0] == []
    assert exchange(node, "a", [], seen_a)[0] == [[4]]


def test_the_newest_are_kept() -> None:
    node = NodeTexts(capacity=4)
    seen = exchange(node, "b", [], None)[1]
    exchange(node, "a", [[1, 1], [2, 2], [3, 3]], None)
    assert exchange(node, "b", [], seen)[0] == [[2, 2], [3, 3]]


def test_an_engine_that_has_looked_in_another_process_begins_anew() -> None:
    before = exchange(NodeTexts(), "b", [[1]] * 9, None)[1]
    node = NodeTexts()
    exchange(node, "a", [[1]], None)
    told, seen = exchange(node, "b", [], before)
    assert told == []
    exchange(node, "a", [[2]], None)
    assert exchange(node, "b", [], seen)[0] == [[2]]
