"""A mixer gives each node of a draft tree what its path gives alone, and stays as it was for all others."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from drafter.drafters.contract import PlainDecoding
from drafter.engine.config import DEFAULT_MAX_LENGTH, EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.target_model import mixers, tree_mixing, tree_scan
from drafter.target_model.mixers import Mixer
from drafter.target_model.model import BaseModel
from drafter.target_model.state_cache import States
from tests.support.hybrids import hybrid_base, hybrid_model
from tests.support.marks import slow_but
from tests.support.models import generate_reference
from tests.support.trees import random_paths

KINDS = ("lfm2", "qwen3_next", "kimi_linear", "granitemoehybrid", "mamba")
"""Short convolutions, gated delta rule, Kimi delta attention, Mamba 2; and Mamba, which has no kernel for trees."""
WIDTH, TEXT, ROWS, NODES = 32, 3, 20, 12


@cache
def mixer_of(family: str) -> Mixer:
    decoder = BaseModel(hybrid_model(family)).decoder
    return next(module.forward for module in decoder.modules() if isinstance(module.forward, Mixer))


def states_after(mixer: Mixer, text: Tensor) -> States:
    """The states that transformers' own cache has after a text `[R, n, d]`."""
    layer, taken = LinearAttentionLayer(), inspect.signature(type(mixer.module).forward).parameters
    name = next(name for name in ("cache", "cache_params", "past_key_values") if name in taken)
    mixer.module(text, **{name: Cache(layers=[layer] * (mixer.layer + 1))})
    kinds: dict[str, Any] = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    return {(kind, 0): states[0].clone() for kind, states in kinds.items() if states[0] is not None}


@pytest.mark.parametrize("trees", slow_but([ROWS], [ROWS, 300]))
@pytest.mark.parametrize("family", KINDS)
@torch.inference_mode()
def test_a_nodes_output_is_that_of_its_path_alone(family: str, trees: int) -> None:
    mixer = mixer_of(family)
    assert (mixer.at_once is None) == (family == "mamba")
    for seed in range(trees // ROWS):
        random, paths = torch.Generator().manual_seed(seed), random_paths(ROWS, NODES, seed)
        text, hidden = (torch.randn(ROWS, size, WIDTH, generator=random) for size in (TEXT, NODES))
        found, _ = mixer.run_tree(hidden.clone(), states_after(mixer, text), paths)
        # Each path by itself, behind its text, padded on the right.
        order = paths.ancestors.int().sort(dim=2, descending=True, stable=True).indices
        row = torch.arange(ROWS)[:, None, None]
        alone = torch.cat([text[:, None].expand(-1, NODES, -1, -1), hidden[row, order]], 2).flatten(0, 1)
        whole = mixer.module(alone).unflatten(0, (ROWS, NODES))
        expected = whole.gather(2, (TEXT + paths.depths)[:, :, None, None].expand(-1, -1, 1, WIDTH))[:, :, 0]
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid"])
@torch.inference_mode()
def test_the_state_after_a_node_is_that_after_its_path(family: str) -> None:
    mixer, paths = mixer_of(family), random_paths(1, NODES, 7)
    text, hidden = (
        torch.randn(1, size, WIDTH, generator=torch.Generator().manual_seed(size)) for size in (TEXT, NODES)
    )
    _, after = mixer.run_tree(hidden.clone(), states_after(mixer, text), paths)
    for node in range(NODES):
        path = hidden[:, paths.ancestors[0, node]]
        expected = states_after(mixer, torch.cat([text, path], 1))
        for key, chosen in after.items():
            found = chosen(torch.tensor([0]), torch.tensor([node]))
            assert (found - expected[key]).abs().max() <= 1e-5 * expected[key].abs().max()


def test_kernels_are_replaced_in_a_copy_alone() -> None:
    mixer = mixer_of("qwen3_next")
    code = sys.modules[type(mixer.module).__module__]
    before = dict(vars(code))
    mixer_of.__wrapped__("qwen3_next")
    assert all(vars(code)[name] is one for name, one in before.items())


def test_a_model_generates_as_before_it_was_loaded_and_loads_twice() -> None:
    model, prompt = hybrid_model("qwen3_next"), [5, 6, 7]
    before = generate_reference(model, prompt, 8)
    found = [
        [module.forward for module in BaseModel(model).decoder.modules() if isinstance(module.forward, Mixer)]
        for _ in range(2)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 3
    assert generate_reference(model, prompt, 8) == before


@pytest.mark.parametrize("fault", ["kernel", "numbers"])
def test_kernels_that_do_not_fit_are_not_used(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """As in another release of transformers: the model runs depth by depth, and gives the same."""
    if fault == "kernel":
        monkeypatch.delitem(tree_mixing._NAMES, "torch_chunk_gated_delta_rule")
    else:
        real = tree_scan.delta_values
        monkeypatch.setattr(tree_mixing, "delta_values", lambda *args: real(*args) * 1.1)
    assert mixer_of.__wrapped__("qwen3_next").at_once is None


def test_recurrent_layers_whose_code_is_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "_UPDATES", {"update_another_state"})
    with pytest.raises(LoadError, match="layers of its own"):
        BaseModel(hybrid_model("lfm2"))


def test_the_plan_counts_what_kernels_keep_of_a_node() -> None:
    found = {family: hybrid_base(family).cache_bytes for family in ("lfm2", "qwen3_next", "mamba")}
    # Three layers each, three states a slot. Convolutions keep three or four inputs for each of their channels.
    assert (found["lfm2"].slot, found["lfm2"].node) == (3 * 3 * 32 * 3 * 4, 3 * 32 * 4)
    channels, state = 2 * 16 + 64, 4 * 8 * 16
    assert found["qwen3_next"].slot == 3 * 3 * (channels * 4 + state) * 4
    # Instead of the state an input, a key, a value and a decay of each head.
    assert found["qwen3_next"].node == 3 * (channels + 2 * 8 + 4 * (16 + 1)) * 4
    own = BaseModel(hybrid_model("qwen3_next"), native=False).cache_bytes
    assert own.node == 3 * (channels * 4 + 4 * (8 + 16 + 1)) * 4
    assert found["mamba"].node == 3 * (3 * 48 + 8) * 4  # inputs, what is written and steps of 48 channels, and a key
    own = BaseModel(hybrid_model("mamba"), native=False).cache_bytes
    assert own.node == own.slot // 3  # all of the state, as no kernel for trees is known


def test_a_model_without_positions_has_no_longest_request_of_its_own() -> None:
    base = BaseModel(hybrid_model("mamba", max_position_embeddings=None))
    assert base.max_positions is None
    for given, expected in ((None, DEFAULT_MAX_LENGTH), (3000, 3000)):
        assert Engine(base, PlainDecoding(), None, EngineConfig(1, given)).max_length == expected
