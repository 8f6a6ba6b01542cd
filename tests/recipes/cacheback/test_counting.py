"""Counts of n-grams: exact where there is room, bounded and never too high where there is not."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from recipes.cacheback.counting import NgramCounts

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=6)


def counted(texts: list[list[int]], most: int, length: int = 3) -> NgramCounts:
    counts = NgramCounts(most, length)
    for text in texts:
        counts.add(text)
    return counts


def test_the_most_frequent_leaders_and_followers_are_kept() -> None:
    table = counted([[1, 2, 3, 1, 2, 4, 1, 2, 3, 1], [5, 6, 7], [8]], most=100).table(leaders=3, followers=1)
    assert table.leaders.tolist() == [1, 2, 3]  # 1 and 2 lead three n-grams; 3, 4 and 5 one, of which the first is kept
    assert [list(table.followers((leader,))) for leader in (1, 2, 3)] == [[(2, 3)], [(3, 1)], [(1, 2)]]


def test_what_is_frequent_outlasts_what_is_rare() -> None:
    texts = [[1, 2, 3], *([token, token, token] for token in range(100, 120))] * 3
    table = counted([[1, 2, 3]] * 4 + texts, most=4).table(leaders=1, followers=4)
    assert table.leaders.tolist() == [1]
    assert list(table.followers((1,))) == [(2, 3)]


@given(TEXTS, st.integers(1, 4), st.integers(1, 3))
def test_counts_are_exact_where_there_is_room(texts: list[list[int]], leaders: int, followers: int) -> None:
    table = counted(texts, most=1000).table(leaders, followers)
    occurred = Counter(tuple(text[place : place + 3]) for text in texts for place in range(len(text) - 2))
    totals = Counter[int]()
    for gram, count in occurred.items():
        totals[gram[0]] += count
    expected = sorted(sorted(totals, key=lambda leader: (-totals[leader], leader))[:leaders])
    assert table.leaders.tolist() == expected
    for leader in expected:
        grams = sorted((-count, gram[1:]) for gram, count in occurred.items() if gram[0] == leader)
        assert list(table.followers((leader,))) == [gram for _, gram in grams[:followers]]


@given(TEXTS, st.integers(1, 12))
def test_memory_is_bounded(texts: list[list[int]], most: int) -> None:
    counts = NgramCounts(most, 3)
    for text in texts:
        counts.add(text)
        assert counts._waiting < most  # what is not merged yet
    occurred = {tuple(text[place : place + 3]) for text in texts for place in range(len(text) - 2)}
    assert len(counts) <= min(most, len(occurred))
    table = counts.table(leaders=100, followers=100)
    assert {
        (leader, *follower) for leader in table.leaders.tolist() for follower in table.followers((leader,))
    } <= occurred
