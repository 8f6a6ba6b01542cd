"""Texts come out as they went in, and no more of them wait than there is room for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter.drafters.text_queue import TextQueue


def test_texts_are_taken_until_they_have_enough_tokens() -> None:
    queue = TextQueue(100)
    queue.put([[1, 2], [3], [4, 5, 6]])
    assert [text.tolist() for text in queue.take(3)] == [[1, 2], [3]]
    assert len(queue) == 3
    assert [text.tolist() for text in queue.take(1)] == [[4, 5, 6]]
    assert queue.take(1) == []


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=20), st.integers(0, 20))
def test_the_oldest_give_way(texts: list[list[int]], capacity: int) -> None:
    queue = TextQueue(capacity)
    for text in texts:
        queue.put([text])
        assert len(queue) <= capacity
    kept = [text.tolist() for text in queue.take(1000)]
    assert kept == texts[len(texts) - len(kept) :]
    assert len(queue) == 0
