""""""

from __future__ import annotations

import torch

from drafter.target.kv_cache import KVCache, LayerShape

CPU = torch.device("cpu")
SHAPE = LayerShape(heads=2, key_dim=3, value_dim=4, dtype=torch.float32, device=CPU)


def states(values: list[list[int]], dim: int) -> torch.Tensor:
    """Keys or values `[b, 2, n, dim]` that carry one number a position."""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(-1, 2, -1, dim)


def filled_cache() -> KVCache:
    """Two slots: the first holds 1 2 and nodes 10 11 12 13, the second 5 6 7 and nodes 20 21 22 23."""
    cache = KVCache([SHAPE, None, SHAPE], slots=3, length=9, device=CPU)
    view = cache.view(0, torch.tensor([[0, 1, 2], [0, 1, 2]]), 3)
    for layer in (0, 2):
        view.update(states([[1, 2, 0], [5, 6, 7]], 3), states([[1, 2, 0], [5, 6, 7]], 4), layer)
    view = cache.view(0, torch.tensor([[2, 3, 4, 5], [3, 4, 5, 6]]), 7)
    for layer in (0, 2):
        keys, values = view.update(
            states([[10, 11, 12, 13], [20, 21, 22, 23]], 3), states([[10, 11, 12, 13], [20, 21, 22, 23]], 4), layer
        )
        assert keys.shape == (2, 2, 7, 3)
        assert values.shape == (2, 2, 7, 4)
    return cache


def read(cache: KVCache, slot: int, count: int, layer: int = 2) -> list[float]:
    nothing = torch.empty(1, 2, 0, 3), torch.empty(1, 2, 0, 4)
    keys, values = cache.view(slot, torch.empty(1, 0, dtype=torch.long), count).update(*nothing, layer)
    assert torch.equal(keys[0, 0, :, 0], values[0, 1, :, 3])
    return keys[0, 0, :, 0].tolist()  # type: ignore[no-any-return]


def test_rows_write_at_their_own_lengths() -> None:
    cache = filled_cache()
    assert read(cache, 0, 6) == [1, 2, 10, 11, 12, 13]
    assert read(cache, 1, 7) == [5, 6, 7, 20, 21, 22, 23]
    assert read(cache, 2, 9) == [0] * 9


def test_commit_moves_each_path_to_the_rows_tail() -> None:
    cache = filled_cache()
    cache.commit(torch.tensor([2, 3]), torch.tensor([[0, 2, 3], [0, 3, 0]]))
    assert read(cache, 0, 5) == [1, 2, 10, 12, 13]
    assert read(cache, 1, 5) == [5, 6, 7, 20, 23]
    assert read(cache, 1, 5, layer=0) == [5, 6, 7, 20, 23]


def test_move_copies_a_row() -> None:
    cache = filled_cache()
    cache.move(1, 2, 3)
    assert read(cache, 2, 4) == [5, 6, 7, 0]


def test_memory_is_what_the_shapes_say() -> None:
    cache = KVCache([SHAPE, None, SHAPE], slots=3, length=9, device=CPU)
    assert cache.nbytes == 2 * 3 * 9 * SHAPE.bytes_per_token == 2 * 3 * 9 * 2 * 7 * 4
