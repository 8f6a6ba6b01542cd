"""The table of n-grams: what it learns, in which order, and what falls out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter.methods.cacheback.drafter import LruTable


def test_followers_come_newest_first() -> None:
    table = LruTable(leaders=10, followers=10, follower_length=2)
    table.learn([1, 2, 3, 1, 4, 5, 1, 2, 3])
    assert list(table.followers((1,))) == [(2, 3), (4, 5)]
    assert list(table.followers((3,))) == [(1, 4)]  # nothing follows the last one yet
    assert list(table.followers((9,))) == []


def test_the_follower_that_was_used_least_recently_falls_out() -> None:
    table = LruTable(leaders=10, followers=2, follower_length=1)
    table.learn([1, 2, 1, 3, 1, 2, 1, 4])
    assert list(table.followers((1,))) == [(4,), (2,)]


def test_the_leader_that_was_used_least_recently_falls_out() -> None:
    table = LruTable(leaders=2, followers=2, follower_length=1)
    table.learn([1, 2, 1, 3, 4])  # leaders 1, 2, 1, 3
    assert [bool(list(table.followers((leader,)))) for leader in (1, 2, 3)] == [True, False, True]


def test_leaders_of_several_tokens() -> None:
    table = LruTable(leaders=10, followers=2, leader_length=2, follower_length=1)
    table.learn([1, 2, 3, 1, 2, 4])
    assert list(table.followers((1, 2))) == [(4,), (3,)]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_the_table_is_bounded_and_has_the_last_uses(
    tokens: list[int], leaders: int, followers: int, length: int
) -> None:
    table = LruTable(leaders, followers, follower_length=length)
    table.learn(tokens)
    uses = [((tokens[place],), tuple(tokens[place + 1 : place + 1 + length])) for place in range(len(tokens) - length)]
    kept = list(dict.fromkeys(leader for leader, _ in reversed(uses)))[:leaders]
    assert len(table) == len(kept)
    if kept:  # A leader that fell out and came again has forgotten its followers, but never its newest ones.
        newest = kept[0]
        expected = list(dict.fromkeys(follower for leader, follower in reversed(uses) if leader == newest))
        found = list(table.followers(newest))
        assert 0 < len(found) <= followers
        assert found == expected[: len(found)]
