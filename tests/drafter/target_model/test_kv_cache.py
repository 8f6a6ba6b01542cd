"""The KV cache, of fixed slots and in blocks."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import Cache

from drafter.target_model.cache import BLOCK, Blocks, GrowingBlocks, TargetCache, blocks_of
from drafter.target_model.kv_cache import KVCache, LayerShape
from drafter.target_model.nodes import PromptNodes
from tests.support.properties import examples

CPU = torch.device("cpu")
SHAPE = LayerShape(heads=2, key_dim=3, value_dim=4, dtype=torch.float32, device=CPU)


def states(values: list[list[int]], dim: int) -> torch.Tensor:
    """Keys or values `[b, 2, n, dim]` that carry one number a position."""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(-1, 2, -1, dim)


def cache_on(blocks: Blocks, shapes: list[LayerShape | None]) -> TargetCache:
    return TargetCache(blocks, [KVCache(shapes, blocks)], len(shapes))


def view(cache: TargetCache, slot: int, lengths: list[int], count: int, kv_length: int) -> Cache:
    """What the model sees of `count` tokens behind `lengths` positions of the slots from `slot` on."""
    before = torch.tensor(lengths)
    positions = before[:, None] + torch.arange(count)
    return cache.view(
        PromptNodes(tokens=positions, lengths=before, positions=positions, kv_length=kv_length, slot=slot)
    )


def filled_cache() -> TargetCache:
    """Two slots: the first holds 1 2 and nodes 10 11 12 13, the second 5 6 7 and nodes 20 21 22 23."""
    cache = cache_on(Blocks(3, 9, CPU), [SHAPE, None, SHAPE])
    seen = view(cache, 0, [0, 0], 3, 3)
    for layer in (0, 2):
        seen.update(states([[1, 2, 0], [5, 6, 7]], 3), states([[1, 2, 0], [5, 6, 7]], 4), layer)
    seen = view(cache, 0, [2, 3], 4, 7)
    for layer in (0, 2):
        keys, values = seen.update(
            states([[10, 11, 12, 13], [20, 21, 22, 23]], 3), states([[10, 11, 12, 13], [20, 21, 22, 23]], 4), layer
        )
        assert keys.shape == (2, 2, 7, 3)
        assert values.shape == (2, 2, 7, 4)
    return cache


def read(cache: TargetCache, slot: int, count: int, layer: int = 2) -> list[float]:
    nothing = torch.empty(1, 2, 0, 3), torch.empty(1, 2, 0, 4)
    keys, values = view(cache, slot, [0], 0, count).update(*nothing, layer)
    assert torch.equal(keys[0, 0, :, 0], values[0, 1, :, 3])
    return keys[0, 0, :, 0].tolist()  # type: ignore[no-any-return]


def test_rows_write_at_their_own_lengths() -> None:
    cache = filled_cache()
    assert read(cache, 0, 6) == [1, 2, 10, 11, 12, 13]
    assert read(cache, 1, 7) == [5, 6, 7, 20, 21, 22, 23]
    assert read(cache, 2, 9) == [0] * 9


def test_commit_moves_each_path_to_the_rows_tail() -> None:
    cache = filled_cache()
    cache.commit(torch.tensor([2, 3]), torch.tensor([[0, 2, 3], [0, 3, 0]]), slice(0, 2))
    assert read(cache, 0, 5) == [1, 2, 10, 12, 13]
    assert read(cache, 1, 5) == [5, 6, 7, 20, 23]
    assert read(cache, 1, 5, layer=0) == [5, 6, 7, 20, 23]


def test_move_copies_a_row() -> None:
    cache = filled_cache()
    cache.move(1, 2, 3)
    assert read(cache, 2, 4) == [5, 6, 7, 0]


def test_memory_is_what_the_shapes_say() -> None:
    cache = cache_on(Blocks(3, 9, CPU), [SHAPE, None, SHAPE])
    assert cache.nbytes == 2 * 3 * 9 * SHAPE.bytes_per_token == 2 * 3 * 9 * 2 * 7 * 4


SHAPES = [LayerShape(2, 3, 4, torch.float32, CPU), None, LayerShape(2, 3, 3, torch.float32, CPU)]
SLOTS, LENGTH = 3, 3 * BLOCK


def growing(blocks: int) -> TargetCache:
    return cache_on(GrowingBlocks(SLOTS, LENGTH, CPU, blocks), SHAPES)


def write(cache: TargetCache, slot: int, start: int, numbers: list[float]) -> None:
    """Write one number a position, in all layers."""
    seen = view(cache, slot, [start], len(numbers), LENGTH)
    for layer, shape in enumerate(SHAPES):
        if shape is not None:
            states = torch.tensor(numbers)[None, None, :, None].expand(1, 2, -1, -1)
            seen.update(states.expand(-1, -1, -1, shape.key_dim), states.expand(-1, -1, -1, shape.value_dim), layer)


def read_row(cache: TargetCache, slot: int, count: int) -> list[float]:
    """The numbers of a slot's first positions, which all layers must have."""
    seen = view(cache, slot, [0], 0, count)
    found = []
    for layer, shape in enumerate(SHAPES):
        if shape is not None:
            nothing = torch.empty(1, 2, 0, shape.key_dim), torch.empty(1, 2, 0, shape.value_dim)
            for states in seen.update(*nothing, layer):
                found.append(states[0].transpose(0, 1).flatten(1))
                assert bool((found[-1] == found[-1][:, :1]).all())
    assert all(torch.equal(one[:, 0], found[0][:, 0]) for one in found)
    return found[0][:, 0].tolist()  # type: ignore[no-any-return]


@examples(60)
@given(st.randoms(use_true_random=False), st.integers(3, 9))
def test_rows_hold_what_slots_of_their_own_would_hold(source: random.Random, blocks: int) -> None:
    """Whatever rows do, what they hold is what it would be in a cache with memory for all of them."""
    whole, paged = cache_on(Blocks(SLOTS, LENGTH, CPU), SHAPES), growing(blocks)
    lengths = [0] * SLOTS
    for _ in range(25):
        slot, other = source.sample(range(SLOTS), 2)
        deed = source.choice(["write", "write", "commit", "copy", "move", "release"])
        if deed == "write" and lengths[slot] < LENGTH - 1:
            numbers = [float(source.randrange(1, 1000)) for _ in range(source.randrange(1, LENGTH - lengths[slot]))]
            if paged.blocks.reserve(slot, lengths[slot] + len(numbers)):
                for cache in (whole, paged):
                    write(cache, slot, lengths[slot], numbers)
                lengths[slot] += len(numbers)
        elif deed == "commit":
            starts = [max(0, length - 4) for length in lengths]
            path = torch.tensor([sorted(source.sample(range(4), 3)) for _ in range(SLOTS)])
            path[[length < 4 for length in lengths]] = 0
            for cache in (whole, paged):
                cache.commit(torch.tensor(starts), path, slice(0, SLOTS))
            lengths = [start + 3 if length >= 4 else length for start, length in zip(starts, lengths, strict=True)]
        elif deed == "copy" and paged.blocks.reserve(other, lengths[slot]):
            for cache in (whole, paged):
                cache.copy(slot, other, lengths[slot])
            lengths[other] = lengths[slot]
        elif deed == "move":
            for cache in (whole, paged):
                cache.move(slot, other, lengths[slot])
            lengths[other], lengths[slot] = lengths[slot], 0
        elif deed == "release":
            paged.blocks.release(slot)
            lengths[slot] = 0
        for row, length in enumerate(lengths):
            assert read_row(paged, row, length) == read_row(whole, row, length), deed


def test_memory_is_taken_by_blocks_and_given_back() -> None:
    cache = growing(4)
    assert [blocks_of(count) for count in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]
    assert cache.blocks.reserve(0, BLOCK + 1)
    assert cache.blocks.has_room(2 * BLOCK, rows=0)
    assert not cache.blocks.has_room(2 * BLOCK, rows=1)
    assert cache.blocks.reserve(1, 2 * BLOCK)
    assert cache.blocks.reserve(0, 2 * BLOCK)  # it has them already
    assert not cache.blocks.reserve(0, 2 * BLOCK + 1)
    cache.blocks.release(1)
    assert cache.blocks.reserve(0, LENGTH + 5)  # a row never has more than its length
    assert cache.blocks.has_room(BLOCK, rows=0)


def test_what_empty_slots_write_goes_where_no_row_reads() -> None:
    cache = growing(3)
    assert cache.blocks.reserve(0, LENGTH)
    write(cache, 0, 0, [float(place) for place in range(LENGTH)])
    write(cache, 2, LENGTH - 2, [float("nan")] * 2)
    assert read_row(cache, 2, LENGTH) == [0.0] * LENGTH
    cache.scrub(torch.tensor([5, 0, LENGTH - 2]), 2, torch.tensor([True, False, True]), slice(0, 3))
    expected = [0.0 if place in (5, 6) else float(place) for place in range(LENGTH)]
    assert read_row(cache, 0, LENGTH) == expected
    assert read_row(cache, 2, LENGTH) == [0.0] * LENGTH


def test_a_cleared_row_is_zero_and_the_others_are_as_they_were() -> None:
    cache = growing(4)
    for slot in (0, 1):
        assert cache.blocks.reserve(slot, 2 * BLOCK)
        write(cache, slot, 0, [1.0 + slot] * 2 * BLOCK)
    cache.clear(0)
    assert read_row(cache, 0, 2 * BLOCK) == [0.0] * 2 * BLOCK
    assert read_row(cache, 1, 2 * BLOCK) == [2.0] * 2 * BLOCK
