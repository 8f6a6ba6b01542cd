"""Native mixers give the numbers of PyTorch's formulas, with the same bits whatever is run beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.native.build import BuildError
from drafter.target_model import native_mixers
from drafter.target_model.mixers import Mixer, run_by_own_code
from drafter.target_model.model import BaseModel
from drafter.target_model.native_decoder import NativeDecoder
from drafter.target_model.nodes import PromptNodes, TreeNodes, prompt_nodes
from drafter.target_model.state_cache import StateCache, States
from drafter.target_model.tree_scan import TreePaths
from tests.support.caches import tree_nodes
from tests.support.hybrids import hybrid_base, hybrid_model
from tests.support.marks import slow_but
from tests.support.trees import random_paths

MAIN = ("qwen3_next", "granitemoehybrid")
FAMILIES = (
    *MAIN,
    "lfm2",
    "lfm2_moe",
    "qwen3_5_text",
    "olmo_hybrid",
    "falcon_h1",
    "nemotron_h",
    "bamba",
    "zamba2",
    "mamba2",
    "mamba",
    "jamba",
)
ROWS, NODES, WIDTH, LENGTH = 5, 9, 32, 250


def cache_of(base: BaseModel, rows: Sequence[int]) -> StateCache:
    """Texts of `LENGTH` tokens with random states, each that of its number whatever its slot is."""
    cache = base.new_cache(len(rows), 64).layers[-1]
    assert isinstance(cache, StateCache)
    for states in cache.buffers.values():
        for buffer in states.values():
            for slot, row in enumerate(rows):
                buffer[slot] = torch.randn(buffer.shape[1:], generator=torch.Generator().manual_seed(row))
    cache.at[0] = LENGTH
    return cache


def mixed(base: BaseModel, cache: StateCache, nodes: PromptNodes | TreeNodes, hidden: Tensor) -> Tensor:
    """What the first mixer gives for these hidden states."""
    native = base.caches.mixers[0].native
    assert native is not None
    return native(cache.view(nodes), hidden)


def trees(paths: TreePaths, length: int = LENGTH) -> TreeNodes:
    rows, size = paths.parents.shape
    lengths, tokens = torch.full((rows,), length), torch.zeros(rows, size, dtype=torch.long)
    return tree_nodes(tokens, lengths, paths.depths, paths.ancestors, 64)


def deepest(paths: TreePaths) -> list[list[int]]:
    return [ancestors[int(ancestors.sum(1).argmax())].nonzero()[:, 0].tolist() for ancestors in paths.ancestors]


def commit(cache: StateCache, length: int, paths: Sequence[Sequence[int]]) -> None:
    longest = max(map(len, paths))
    path = torch.tensor([[*one, *[0] * (longest - len(one))] for one in paths])
    cache.commit(torch.full((len(paths),), length), path, slice(0, len(paths)))


def states_at(base: BaseModel, cache: StateCache, slot: int, length: int) -> States:
    rows = [row for row in (0, 1) if int(cache.at[row, slot]) == length]
    entry = rows[0] * cache.slots + slot
    return {key: buffer[entry] for key, buffer in cache.buffers[base.caches.mixers[0].layer].items()}


def equal(one: States, other: States) -> bool:
    return all(torch.equal(state, other[key]) for key, state in one.items())


@pytest.mark.parametrize("family", slow_but(MAIN, FAMILIES))
@torch.inference_mode()
def test_a_tree_has_the_numbers_of_pytorchs_formula(family: str) -> None:
    base, paths = hybrid_base(family), random_paths(ROWS, NODES, seed=1)
    mixer, hidden = base.caches.mixers[0], torch.randn(ROWS, NODES, WIDTH, generator=torch.Generator().manual_seed(2))
    cache, accepted = cache_of(base, range(ROWS)), deepest(paths)
    before = cache.view(trees(paths)).committed(mixer.layer)
    expected, after = mixer.run_tree(hidden.clone(), before, paths)
    found = mixed(base, cache, trees(paths), hidden)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    commit(cache, LENGTH, accepted)
    for row, path in enumerate(accepted):
        states = states_at(base, cache, row, LENGTH + len(path))
        for key, chosen in after.items():
            wanted = chosen(torch.tensor([row]), torch.tensor([path[-1]]))[0]
            assert (states[key] - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", slow_but(MAIN, FAMILIES))
@torch.inference_mode()
def test_a_prompt_has_the_numbers_of_the_models_own_code(family: str) -> None:
    base, text = hybrid_base(family), torch.randn(1, 70, WIDTH, generator=torch.Generator().manual_seed(3))
    cache = base.new_cache(1, 80).layers[-1]
    assert isinstance(cache, StateCache)
    pieces = []
    for start, end in ((0, 33), (33, 70)):
        nodes = prompt_nodes(0, [torch.zeros(end - start, dtype=torch.long)], [start], ())
        pieces.append(mixed(base, cache, nodes, text[:, start:end]))
    found, expected = torch.cat(pieces, 1), base.caches.mixers[0].module(text)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", slow_but(MAIN, [one for one in FAMILIES if one not in ("nemotron_h", "zamba2")]))
@torch.inference_mode()
def test_a_path_has_the_bits_of_its_tokens_alone(family: str) -> None:
    """In a tree, step by step, and in prompts that are read together; two families limit the steps of these."""
    base, paths = hybrid_base(family), random_paths(ROWS, NODES, seed=4)
    hidden = torch.randn(ROWS, NODES, WIDTH, generator=torch.Generator().manual_seed(5))
    cache, accepted = cache_of(base, range(ROWS)), deepest(paths)
    found = mixed(base, cache, trees(paths), hidden)
    commit(cache, LENGTH, accepted)

    together, prompts = cache_of(base, range(ROWS)), [torch.zeros(len(path), dtype=torch.long) for path in accepted]
    texts = torch.cat([hidden[row, path] for row, path in enumerate(accepted)])
    read = mixed(base, together, prompt_nodes(0, prompts, [LENGTH] * ROWS, ()), texts[None])[0]
    parts = read.split([len(path) for path in accepted])

    for row, path in enumerate(accepted):
        alone, outputs, end = cache_of(base, [row]), [], LENGTH + len(path)
        for place, node in enumerate(path):
            step = trees(random_paths(1, 1, seed=0), LENGTH + place)
            outputs.append(mixed(base, alone, step, hidden[row, node][None, None])[0, 0])
            commit(alone, LENGTH + place, [[0]])
        assert torch.equal(torch.stack(outputs), found[row, path])
        assert torch.equal(torch.stack(outputs), parts[row])
        assert equal(states_at(base, alone, 0, end), states_at(base, cache, row, end))
        assert equal(states_at(base, alone, 0, end), states_at(base, together, row, end))


@torch.inference_mode()
def test_prompts_leave_their_states_at_borders_and_before_their_last_token() -> None:
    base, count = hybrid_base(MAIN[0]), 9
    text = torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(6))
    cache, alone = cache_of(base, [0, 1]), cache_of(base, [0])
    mixed(base, cache, prompt_nodes(0, [torch.zeros(count, dtype=torch.long)], [LENGTH], (), keep=1), text)
    layer = base.caches.mixers[0].layer
    for place in range(count):
        mixed(base, alone, trees(random_paths(1, 1, seed=0), LENGTH + place), text[:, place : place + 1])
        commit(alone, LENGTH + place, [[0]])
        length = LENGTH + place + 1
        if length == 256:
            place_of_border = cache.snapshots.place(0, 256)
            assert place_of_border is not None
            entry = 2 * cache.slots + place_of_border
            snapshot = {key: buffer[entry] for key, buffer in cache.buffers[layer].items()}
            assert equal(snapshot, states_at(base, alone, 0, 256))
        if length >= LENGTH + count - 1:
            assert equal(states_at(base, cache, 0, length), states_at(base, alone, 0, length))


@torch.inference_mode()
def test_a_state_that_is_not_finite_harms_no_other() -> None:
    base, paths = hybrid_base(MAIN[0]), random_paths(2, NODES, seed=7)
    hidden, cache = torch.randn(2, NODES, WIDTH), cache_of(base, range(2))
    sound = mixed(base, cache, trees(paths), hidden)
    for buffer in cache.buffers[base.caches.mixers[0].layer].values():
        buffer[0] = torch.nan
    broken = mixed(base, cache, trees(paths), hidden)
    assert broken[0].isnan().all()
    assert torch.equal(broken[1], sound[1])


@pytest.mark.parametrize("threads", [1, 5])
@torch.inference_mode()
def test_threads_do_not_matter(threads: int) -> None:
    base, paths = hybrid_base(MAIN[1]), random_paths(ROWS, NODES, seed=8)
    hidden = torch.randn(ROWS, NODES, WIDTH, generator=torch.Generator().manual_seed(9))

    def run() -> list[Tensor]:
        cache = cache_of(base, range(ROWS))
        found = mixed(base, cache, trees(paths), hidden)
        commit(cache, LENGTH, deepest(paths))
        return [found, *(buffer for states in cache.buffers.values() for buffer in states.values())]

    before, usual = run(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(map(torch.equal, run(), before))
    finally:
        torch.set_num_threads(usual)


def natives(base: BaseModel) -> list[bool]:
    return [mixer.native is not None for mixer in base.caches.mixers]


def test_what_has_no_kernel_runs_by_its_own_code() -> None:
    assert natives(hybrid_base("qwen3_next")) == [True] * 3
    assert isinstance(hybrid_base("qwen3_5_text")._executor, NativeDecoder)
    assert natives(hybrid_base("kimi_linear")) == [False] * 3  # no kernel
    assert natives(BaseModel(hybrid_model("qwen3_next").bfloat16())) == [False] * 3
    uneven = BaseModel(hybrid_model("qwen3_5_text", linear_value_head_dim=12))
    assert (natives(uneven), uneven.executor_name) == ([False] * 3, "ModelCode")
    own = BaseModel(hybrid_model("qwen3_next"), native=False)
    assert natives(own) == [False] * 3
    assert own.cache_bytes.row > 0  # the copies of states from which PyTorch's kernels go on


@pytest.mark.parametrize("fault", ["numbers", "compiler"])
def test_a_kernel_that_gives_other_numbers_or_is_not_there_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    real = native_mixers.MIXERS["Qwen3NextGatedDeltaNet"]

    def described(module: Any) -> native_mixers.Description:
        if fault == "compiler":
            raise BuildError("there is no C++ compiler")
        found = real(module)
        found.settings["rate"] = 2
        return found

    monkeypatch.setitem(native_mixers.MIXERS, "Qwen3NextGatedDeltaNet", described)
    base = BaseModel(hybrid_model("qwen3_next"))
    assert natives(base) == [False] * 3
    assert "mixes by its own code" in caplog.text


@torch.inference_mode(False)
def test_new_weights_are_those_of_the_kernel() -> None:
    base, other = BaseModel(hybrid_model("granitemoehybrid")), BaseModel(hybrid_model("granitemoehybrid", seed=1))
    own, new = (dict(one.model.named_parameters()) for one in (base, other))
    base.update_weights([(parameter, new[name]) for name, parameter in own.items()])
    text = torch.arange(5, 30)
    with torch.inference_mode():
        found, expected = (one.prefill(one.new_cache(1, 64), 0, [text]) for one in (base, other))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_mixer_can_be_given_back_to_the_models_code() -> None:
    base = BaseModel(hybrid_model("granitemoehybrid"))
    with torch.inference_mode():
        found = base.prefill(base.new_cache(1, 64), 0, [torch.arange(5, 30)])
        run_by_own_code(base.caches.mixers)
        assert all(isinstance(mixer, Mixer) and mixer.native is None for mixer in base.caches.mixers)
        own = base.prefill(base.new_cache(1, 64), 0, [torch.arange(5, 30)])
    assert (found - own).abs().max() <= 1e-4 * own.abs().max()
