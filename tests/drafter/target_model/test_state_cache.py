"""Which state belongs to a slot's text, whatever happened in its slot before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drafter.target_model.cache import CacheBytes
from drafter.target_model.nodes import prompt_nodes
from drafter.target_model.state_cache import Key, Snapshot, StateCache, StateShape, StateView, least_worth
from tests.support.caches import tree_nodes

KEY: Key = ("recurrent", 0)
LAYER, VIEW = 0, 1


def new_cache(slots: int = 3) -> StateCache:
    cpu = torch.device("cpu")
    return StateCache({LAYER: {KEY: StateShape((1,), torch.float32, cpu)}}, slots, cpu, VIEW, CacheBytes(node=4), True)


def read_prompt(
    cache: StateCache, slot: int, length: int, state: float, before: float | None = None, start: int = 0
) -> None:
    """Read a text to its end, and also its last token alone if the state `before` it is given.

    Snapshots have their length as their state.
    """
    keep = 0 if before is None else 1
    cache.views(prompt_nodes(slot, [torch.zeros(length - start, dtype=torch.long)], [start], (), keep), ())
    for stop in cache.stops(range(start, length), keep):
        cache.put_snapshot(slot, LAYER, stop, {KEY: torch.tensor([[float(stop)]])})
    earlier = None if before is None else {KEY: torch.tensor([[before]])}
    cache.put(slot, LAYER, earlier, {KEY: torch.tensor([[state]])})


def step(cache: StateCache, lengths: Sequence[int], after: Sequence[Sequence[float]]) -> list[float]:
    """Run trees, one node below the other, whose nodes have these states; return the states of the texts."""
    states, nodes = torch.tensor(after), len(after[0])
    ancestors = torch.ones(nodes, nodes).tril().bool().expand(len(after), -1, -1)
    tokens = torch.zeros(len(after), nodes, dtype=torch.long)
    trees = tree_nodes(tokens, torch.tensor(lengths), torch.arange(nodes).expand(len(after), -1), ancestors, 64)
    view = cache.views(trees, ())[VIEW]
    assert isinstance(view, StateView)

    def chosen(row: Tensor, node: Tensor) -> Tensor:
        return states[row, node][:, None]

    cache.nodes[LAYER] = {KEY: chosen}
    return [float(one) for one in view.committed(LAYER)[KEY][:, 0]]


def commit(cache: StateCache, lengths: Sequence[int], path: Sequence[Sequence[int]]) -> None:
    cache.commit(torch.tensor(lengths), torch.tensor(path), slice(0, len(path)))


def test_a_step_that_is_not_committed_loses_nothing() -> None:
    cache = new_cache()
    read_prompt(cache, 0, 5, 1.5)
    assert step(cache, [5], [[2.0, 3.0]]) == [1.5]
    commit(cache, [5], [[0, 1]])
    assert step(cache, [5], [[4.0, 5.0]]) == [1.5]  # as after a failure, where the length has stayed
    commit(cache, [5], [[0, 0]])
    assert step(cache, [6], [[6.0, 7.0]]) == [4.0]
    commit(cache, [6], [[0, 1]])
    assert step(cache, [8], [[0.0]]) == [7.0]


def test_a_prompts_last_token_may_be_committed_or_not() -> None:
    cache = new_cache()
    read_prompt(cache, 0, 5, 2.5, before=1.5)
    assert step(cache, [4], [[9.0]]) == [1.5]
    assert step(cache, [5], [[9.0]]) == [2.5]


def test_a_recycled_slot_begins_with_nothing() -> None:
    cache = new_cache()
    read_prompt(cache, 0, 3, 1.5)
    assert step(cache, [3], [[2.0]]) == [1.5]
    commit(cache, [3], [[0]])
    assert step(cache, [0], [[3.0, 4.0, 5.0]]) == [0.0]
    commit(cache, [0], [[0, 1, 2]])
    # Three tokens long, as the text before was once.
    assert step(cache, [3], [[6.0]]) == [5.0]


def test_a_row_that_is_not_sound_keeps_its_state_and_leaves_none_behind() -> None:
    cache = new_cache(2)
    read_prompt(cache, 0, 5, 1.5)
    read_prompt(cache, 1, 7, 2.5)
    step(cache, [5, 7], [[torch.nan, torch.nan], [3.0, 4.0]])
    commit(cache, [5, 7], [[0, 1], [0, 1]])
    cache.scrub(torch.tensor([5, 7]), 2, torch.tensor([True, False]), slice(0, 2))
    assert all(bool(one.isfinite().all()) for one in cache.buffers[LAYER].values())
    assert step(cache, [5, 9], [[0.0], [0.0]]) == [1.5, 4.0]
    assert step(cache, [7, 7], [[0.0], [0.0]]) == [0.0, 2.5]


def test_a_step_over_a_slot_whose_prompt_is_being_read_leaves_its_state() -> None:
    """As on a GPU, whose steps have more rows than are decoded: such a slot counts as full, as does a parked row's."""
    cache = new_cache(2)
    read_prompt(cache, 0, 5, 1.5)
    read_prompt(cache, 1, 4, 2.5)
    step(cache, [5, 64], [[2.0], [9.0]])
    commit(cache, [5, 64], [[0], [0]])
    assert step(cache, [6, 4], [[3.0], [3.5]]) == [2.0, 2.5]
    commit(cache, [6, 4], [[0], [0]])
    step(cache, [64, 5], [[9.0], [4.5]])  # now the first is parked, whose newer state is in the other place
    commit(cache, [64, 5], [[0], [0]])
    assert step(cache, [7, 6], [[0.0], [0.0]]) == [3.0, 4.5]


def test_a_prompts_state_is_shared_and_moves_with_its_slot() -> None:
    cache = new_cache()
    read_prompt(cache, 0, 5, 1.5)
    step(cache, [5], [[2.0]])
    commit(cache, [5], [[0]])
    cache.move(0, 1, 6)
    assert (cache.shareable(1, 4), cache.shareable(1, 9)) == (0, 5)
    cache.copy(1, 0, 5)
    assert step(cache, [5, 6], [[0.0], [0.0]]) == [5.0, 2.0]
    cache.clear(1)
    assert (cache.shareable(1, 9), cache.shareable(0, 9)) == (0, 5)
    assert step(cache, [5, 6], [[0.0], [0.0]]) == [5.0, 0.0]
    cache.zero()
    assert step(cache, [5, 6], [[0.0], [0.0]]) == [0.0, 0.0]


def test_snapshots_lie_every_256_tokens_and_at_the_end_of_a_prompt() -> None:
    cache = new_cache(4)
    read_prompt(cache, 0, 300, 0.0)
    read_prompt(cache, 0, 601, 0.0, before=0.0, start=300)  # the second piece: the prompt does not end at 300
    assert [cache.shareable(0, length) for length in (255, 256, 511, 512, 599, 600, 900)] == [
        0,
        256,
        256,
        512,
        512,
        600,
        600,
    ]
    cache.copy(0, 1, 512)
    assert [cache.shareable(1, length) for length in (300, 900)] == [256, 512]
    assert step(cache, [601, 512], [[0.0], [0.0]]) == [0.0, 512.0]
    read_prompt(cache, 0, 3, 0.0)  # another text in the slot of the first one
    assert (cache.shareable(0, 900), cache.shareable(1, 900)) == (3, 512)
    cache.copy(1, 2, 512)
    assert step(cache, [3, 512, 512], [[0.0]] * 3) == [0.0, 512.0, 512.0]


def test_there_are_as_many_snapshots_as_slots_and_those_in_use_stay() -> None:
    cache = new_cache(3)
    read_prompt(cache, 0, 2_000, 0.0)
    assert [cache.shareable(0, length) for length in (255, 511, 1_999, 2_000)] == [0, 256, 512, 2_000]
    cache.copy(0, 1, 512)
    read_prompt(cache, 1, 1_900, 0.0, start=512)
    assert (cache.shareable(1, 1_899), cache.shareable(1, 2_000)) == (512, 1_900)
    assert (cache.shareable(0, 511), cache.shareable(0, 2_000)) == (256, 512)
    cache.copy(0, 2, 512)
    assert step(cache, [2_000, 1_900, 512], [[0.0]] * 3) == [0.0, 0.0, 512.0]


def test_those_between_thin_out_with_the_length() -> None:
    cache = new_cache(6)
    read_prompt(cache, 0, 3_599, 0.0)
    assert [cache.shareable(0, length) for length in (512, 1_279, 2_047, 3_598, 3_599)] == [
        512,
        768,
        1_280,
        2_048,
        3_599,
    ]


def test_a_snapshot_of_a_forward_that_failed_is_not_shared() -> None:
    cache = new_cache()
    read_prompt(cache, 0, 256, 0.0)
    cache.views(prompt_nodes(0, [torch.zeros(44, dtype=torch.long)], [256], ()), ())  # and nothing is written
    read_prompt(cache, 0, 400, 0.0, start=256)
    assert (cache.shareable(0, 399), cache.shareable(0, 400)) == (256, 400)


def snapshots(*rows: tuple[int, str, str]) -> list[Snapshot]:
    """Of (length, slots, salt); those of a salt in capitals have been copied. The place is the number in the list."""
    return [
        Snapshot(place, length, {int(slot) for slot in slots}, salt.lower(), salt.isupper())
        for place, (length, slots, salt) in enumerate(rows)
    ]


LEAST_WORTH = {
    "alone, the new one goes": (snapshots((256, "0", "a")), 0),
    "the middle one": (snapshots((256, "0", "a"), (512, "0", "a"), (768, "0", "a")), 1),
    "the closest in proportion": (snapshots(*((length, "0", "a") for length in (256, 512, 768, 1024, 1200))), 3),
    "that was used longest ago of firsts and lasts": (
        snapshots((900, "0", "a"), (256, "0", "a"), (256, "1", "a"), (900, "1", "a")),
        0,
    ),
    "none that was copied": (snapshots((256, "0", "a"), (512, "01", "A"), (768, "0", "a")), 0),
    "of copied ones beyond half, the oldest": (snapshots((256, "01", "A"), (512, "01", "A"), (768, "0", "a")), 0),
    "its own, not a stranger's": (snapshots((256, "0", "b"), (256, "1", "a"), (700, "1", "a")), 1),
    "the greediest salt's": (
        snapshots((256, "0", "b"), (512, "0", "b"), (768, "0", "b"), (256, "1", "a")),
        1,
    ),
    "never a copied one before what strangers hold in excess": (
        snapshots((256, "0", "B"), (512, "0", "b"), (256, "1", "a"), (512, "1", "a"), (768, "1", "a")),
        3,
    ),
}


@pytest.mark.parametrize("case", LEAST_WORTH)
def test_which_snapshot_goes(case: str) -> None:
    known, place = LEAST_WORTH[case]
    assert least_worth(known).place == place


ANY = st.builds(
    Snapshot,
    st.just(0),
    st.integers(1, 6).map(lambda border: 256 * border),
    st.sets(st.integers(0, 3), min_size=1, max_size=2),
    st.sampled_from("abc"),
    st.booleans(),
)


@given(st.lists(ANY, min_size=1, max_size=12))
def test_what_goes_is_of_a_salt_with_most_and_no_text_loses_its_ends_first(known: list[Snapshot]) -> None:
    gone, held = least_worth(known), Counter(one.salt for one in known)
    assert held[gone.salt] == max(held.values())
    assert gone.salt == known[-1].salt or held[known[-1].salt] < held[gone.salt]
    own = [one for one in known if one.salt == gone.salt]
    assert gone.copied == (2 * sum(one.copied for one in own) > len(own))

    def between(one: Snapshot) -> bool:
        beside = [other.length for other in own if other.slots & one.slots]
        return min(beside) < one.length < max(beside)

    if not gone.copied and any(between(one) and not one.copied for one in own):
        assert between(gone)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=40))
def test_strangers_never_take_a_salts_share(places: int, added: list[tuple[int, int]]) -> None:
    """Each slot is a salt of its own. It keeps as many as an equal share of the places, or all that it ever had."""
    cache = new_cache(places)
    for slot in range(4):
        cache.enter(slot, str(slot))
    most, salts = Counter[int](), {slot for slot, _ in added}
    for slot, border in added:
        if cache.snapshots.place(slot, 256 * border) is None:
            cache.snapshots.add(slot, 256 * border)
        held = {one: sum(cache.snapshots.place(one, 256 * at) is not None for at in range(1, 10)) for one in salts}
        assert sum(held.values()) <= places
        for one in salts:
            most[one] = max(most[one], held[one])
            assert held[one] >= min(most[one], places // len(salts))


def test_a_place_that_one_forward_needs_twice_has_the_later_snapshot() -> None:
    cache = new_cache(1)
    read_prompt(cache, 0, 600, 0.0)
    assert (cache.shareable(0, 599), cache.shareable(0, 600)) == (0, 600)
    assert float(cache.buffers[LAYER][KEY][2]) == 600.0


Blocks = tuple[int, ...]
"""A text whose every 256 tokens are a number, and 9 tokens more."""
SLOTS = 6  # places of snapshots, which three texts can more than fill
SLOT = st.integers(0, 2)
ENTER = st.tuples(SLOT, st.lists(st.integers(1, 2), min_size=1, max_size=3).map(tuple))
MOVE = st.tuples(SLOT, SLOT)
CLEAR = st.tuples(SLOT)


def length_of(text: Blocks) -> int:
    return 256 * len(text) + 9


def state_of(text: Blocks, length: int) -> float:
    """A number that only texts that begin with the same tokens have."""
    return float(f"{''.join(map(str, text[: length // 256]))}{length % 256}")


def shared_blocks(one: Blocks, other: Blocks) -> int:
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


@given(st.lists(st.one_of(ENTER, MOVE, CLEAR), min_size=3, max_size=30))
def test_what_is_shared_is_the_state_of_the_same_beginning(steps: list[tuple[int, Blocks] | tuple[int, ...]]) -> None:
    """As the scheduler does it: a text copies what it can from the one with the longest common beginning."""
    cache, texts = new_cache(SLOTS), dict[int, Blocks]()
    for slot, *rest in steps:
        match rest:
            case [tuple(text)]:
                texts.pop(slot, None)
                common = {one: shared_blocks(text, other) for one, other in texts.items()}
                donor = max(common, key=common.__getitem__, default=slot)
                start = cache.shareable(donor, min(256 * common.get(donor, 0), length_of(text) - 1))
                if donor != slot and start:
                    cache.copy(donor, slot, start)
                    assert float(cache.buffers[LAYER][KEY][SLOTS + slot]) == state_of(text, start)
                else:
                    start = 0
                span = range(start, length_of(text))
                tokens = torch.zeros(len(span), dtype=torch.long)
                cache.views(prompt_nodes(slot, [tokens], [start], ()), ())
                for stop in cache.stops(span, 0):
                    cache.put_snapshot(slot, LAYER, stop, {KEY: torch.tensor([[state_of(text, stop)]])})
                texts[slot] = text
            case [int(target)] if slot in texts and target != slot:
                cache.move(slot, target, length_of(texts[slot]))
                texts[target] = texts.pop(slot)
            case []:
                cache.clear(slot)
                texts.pop(slot, None)
        for one, text in texts.items():
            for length in range(256, length_of(text) + 256, 256):
                if known := cache.shareable(one, length):
                    place = cache.snapshots.place(one, known)
                    assert place is not None
                    assert float(cache.buffers[LAYER][KEY][2 * SLOTS + place]) == state_of(text, known)
