"""Each engine gets what the others have said since it looked last, once, and never its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.engines.shared_texts import NodeTexts


def exchange(node: NodeTexts, engine: str, said: Sequence[list[int]]) -> list[list[int]]:
    return [text.tolist() for text in node.exchange(engine, [np.array(text, np.int32) for text in said])]


def test_each_gets_what_the_others_have_said() -> None:
    node = NodeTexts()
    assert exchange(node, "a", [[1]]) == []
    assert exchange(node, "b", []) == []
    assert exchange(node, "a", [[2], [3]]) == []
    assert exchange(node, "b", [[4]]) == [[2], [3]]
    assert exchange(node, "b", []) == []
    assert exchange(node, "a", []) == [[4]]


def test_the_newest_are_kept() -> None:
    node = NodeTexts(capacity=4)
    exchange(node, "b", [])
    exchange(node, "a", [[1, 1], [2, 2], [3, 3]])
    assert exchange(node, "b", []) == [[2, 2], [3, 3]]


def test_an_engine_begins_again_in_another_process() -> None:
    exchange(NodeTexts(), "b", [[1]] * 9)
    node = NodeTexts()
    exchange(node, "a", [[1]])
    assert exchange(node, "b", []) == []
    exchange(node, "a", [[2]])
    assert exchange(node, "b", []) == [[2]]
