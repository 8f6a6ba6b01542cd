"""The suffix index finds what a search through all texts finds, and stays within its memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafter.methods.memory.drafter import CONTEXT, NOTHING, SuffixIndex, Text
from tests.support.properties import examples


def written(index: SuffixIndex, *texts: list[int], group: int = 0) -> list[Text]:
    found = [Text(group) for _ in texts]
    index.append(found, texts)
    return found


def test_the_longest_match_comes_first_and_then_the_newest() -> None:
    index = SuffixIndex(1000)
    written(index, [7, 8, 1, 2, 3, 50], [9, 1, 2, 3, 60, 61], [4, 1, 2, 3, 70, 71])
    (text,) = written(index, [5, 9, 1, 2, 3])
    found = index.look_up([text], depth=2, most=3)
    assert found.lengths.tolist() == [[4, 3, 3]]
    assert found.paths.tolist() == [[[60, 61], [70, 71], [50, NOTHING]]]


def test_a_match_of_one_token_counts_and_comes_last() -> None:
    index = SuffixIndex(1000)
    written(index, [1, 2, 3], [9, 2, 5])
    found = index.look_up(written(index, [9, 2]), depth=1, most=3)
    assert found.lengths.tolist() == [[2, 1, 0]]
    assert found.paths[0, :2, 0].tolist() == [5, 3]


def test_a_text_is_found_in_itself_while_it_is_written() -> None:
    index = SuffixIndex(1000)
    (text,) = written(index, [1, 2, 3])
    for token in (4, 1, 2):
        index.append([text], [[token]])
    assert index.look_up([text], depth=3, most=1).paths.tolist() == [[[3, 4, 1]]]


def test_texts_of_other_groups_are_not_found() -> None:
    index = SuffixIndex(1000)
    written(index, [1, 2, 3, 4], group=1)
    (other,) = written(index, [1, 2], group=2)
    (same,) = written(index, [1, 2], group=1)
    assert not index.look_up([other], depth=2, most=4).lengths.any()
    assert index.look_up([same], depth=2, most=4).paths[0, 0].tolist() == [3, 4]


def test_short_texts_share_blocks_and_stay_apart() -> None:
    index = SuffixIndex(8 * 128, writers=2)
    count = 8 * (128 // 11)  # ten tokens, and a place between two texts
    for number in range(0, count, 2):
        for text in written(index, *([100 * one + place for place in range(10)] for one in (number, number + 1))):
            index.end(text)
    assert index.filled == 10 * count
    tails = written(index, *([100 * one + 7, 100 * one + 8] for one in (0, count - 1)))
    paths = index.look_up(tails, depth=3, most=1).paths[:, 0]
    assert paths.tolist() == [[9, NOTHING, NOTHING], [100 * (count - 1) + 9, NOTHING, NOTHING]]


def test_what_was_of_use_stays_longer() -> None:
    index = SuffixIndex(4 * 128)
    for start in (1000, 2000):
        (text,) = written(index, list(range(start, start + 128)))
        index.end(text)
    tails = written(index, [1000, 1001], [2000, 2001])
    index.credit(index.look_up(tails[:1], depth=1, most=1).blocks[0])
    written(index, list(range(3000, 3128)))  # one of the first two texts has to give way
    assert index.look_up(tails, depth=1, most=1).paths[:, 0, 0].tolist() == [1002, NOTHING]


def test_it_knows_how_many_tokens_are_in_it() -> None:
    index = SuffixIndex(4 * 128)
    for text in written(index, [1] * 100, [2] * 200):
        index.end(text)
    assert index.filled == 300
    written(index, [3] * 300)  # takes the only free block and two others
    assert index.filled == np.count_nonzero(index._tokens != NOTHING) < 500


def test_memory_is_bounded_and_texts_under_way_keep_their_last_block() -> None:
    index = SuffixIndex(10_000, writers=3)
    before, texts = index.nbytes, [Text() for _ in range(3)]
    for _ in range(100):
        index.append(texts, [list(range(300))] * 3)
    assert index.nbytes == before < 550_000
    assert index.look_up(texts, depth=4, most=2).lengths.any()


def naive(texts: list[list[int]], tail: list[int], depth: int) -> tuple[int, set[tuple[int, ...]]]:
    """The length of the longest match, and how texts go on after such matches."""
    best, paths = 0, set[tuple[int, ...]]()
    for text in texts:
        for end in range(1, len(text)):
            length = 0
            while length < min(end, len(tail), CONTEXT) and text[end - 1 - length] == tail[-1 - length]:
                length += 1
            if length >= max(best, 1):
                paths = paths if length == best else set()
                best = length
                paths.add(tuple(text[end : end + depth]))
    return best, paths


@examples(100)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=60), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=60), max_size=6),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_a_search_through_all_texts_finds_the_same(
    texts: list[list[int]], ended: list[list[int]], cuts: list[int], depth: int
) -> None:
    index = SuffixIndex(50_000, writers=len(texts))
    for one in ended:
        index.end(*written(index, one))
    found = [Text() for _ in texts]
    pieces = np.cumsum([0, *cuts, 60])
    for start, stop in pairwise(pieces.tolist()):  # piece by piece, in turns
        index.append(found, [text[start:stop] for text in texts])
    result = index.look_up(found, depth, most=32)
    for row, text in enumerate(texts):
        length, paths = naive([*ended, *texts], text, depth)
        best = int(result.lengths[row].max())
        ours = {
            tuple(token for token in path.tolist() if token != NOTHING)
            for path, some in zip(result.paths[row], result.lengths[row], strict=True)
            if some == best > 0
        }
        # Of tokens that are very frequent the newest places alone are known.
        assert best == length or (best < length and sum(map(len, [*ended, *texts])) > 32)
        if best == length:
            assert ours <= paths
            assert bool(ours) == bool(paths)
