"""The native decoder gives the model's own numbers, and the same ones whatever is computed beside them."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from drafter.native import build
from drafter.native.build import BuildError, UnsuitableError, gated_order
from drafter.requests import Request, SamplingParams
from drafter.target_model import native_decoder
from drafter.target_model.architecture import decoder_of
from drafter.target_model.attention import Packing
from drafter.target_model.blocks import FAMILIES
from drafter.target_model.cache import GrowingBlocks, TargetCache
from drafter.target_model.forward import Executor
from drafter.target_model.mixers import run_natively
from drafter.target_model.model import BaseModel
from drafter.target_model.native_decoder import NativeDecoder
from drafter.target_model.nodes import LM_HEAD_INPUT, PromptNodes, TreeNodes, prompt_nodes
from drafter.tree.token_tree import TokenTree
from tests.support.caches import kv_of, tree_nodes
from tests.support.marks import slow_but
from tests.support.models import (
    AdversarialDrafter,
    OracleDrafter,
    generate_reference,
    random_prompts,
    run_engine,
    tokens_of,
)

LAST = (LM_HEAD_INPUT,)
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": _LAYERS}
_TWO_BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
}
_EXPERTS = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one KV head, and heads that are not d / H": {"head_dim": 32, "num_key_value_heads": 1},
    "a KV head for each query head": {"num_key_value_heads": 4},
    "sizes that fill no vector": {"hidden_size": 44, "intermediate_size": 51, "vocab_size": 101, "head_dim": 16},
    "tied embeddings, biases everywhere": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "scaled rotary positions": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "mistral, a window shorter than the trees": {"sliding_window": 4},
    "gemma2": {
        **_GEMMA,
        "head_dim": 256,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3_text": {**_GEMMA, "final_logit_softcapping": 5.0, "rope_parameters": _TWO_BASES},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "layer_types": _LAYERS},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 8.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "phi3": {"sliding_window": 8},
    "phi3, half of a head rotated": {
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "phi3, frequencies that change past 48 tokens": {
        "original_max_position_embeddings": 48,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + number / 8 for number in range(8)],
            "long_factor": [8.0] * 8,
            "original_max_position_embeddings": 48,
        },
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 48,
        "head_dim": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "qwen3_moe": {**_EXPERTS, "mlp_only_layers": [1]},
    "qwen3_moe, weights of all experts": {**_EXPERTS, "norm_topk_prob": False},
}
COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(shape: str, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    """A random model; of weights that are exact in bf16 if that is the dtype."""
    torch.manual_seed(0)
    named = shape.partition(",")[0]
    config = AutoConfig.for_model(
        named if named in FAMILIES else "llama", **{**COMMON, **SHAPES.get(shape, {}), **others}
    )
    eager = {"attn_implementation": "eager"} if config.model_type == "gemma2" else {}  # SDPA has no caps
    model = AutoModelForCausalLM.from_config(config, **eager).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            varied = 3 * parameter if parameter.dim() > 1 else parameter + 0.1 * torch.randn_like(parameter)
            parameter.copy_(varied.to(dtype))
    return model


def verified(executor: Executor, cache: TargetCache, nodes: PromptNodes | TreeNodes) -> tuple[Tensor, Tensor]:
    logits, hidden = executor.forward(cache, nodes)
    assert logits is not None
    return logits, hidden


def native_of(base: BaseModel) -> NativeDecoder:
    run_natively(base.caches.mixers)
    return NativeDecoder(base.model, base.decoder, base.config)


_BASES = {
    "llama": torch.float32,
    "llama, bf16": torch.bfloat16,
    "gemma2": torch.float32,
    "granite": torch.float32,
    "qwen3_moe": torch.bfloat16,
    "qwen3_5_text": torch.float32,
}


@pytest.fixture(scope="module", params=_BASES)
def base(request: pytest.FixtureRequest) -> BaseModel:
    """Weights of either kind; all sizes are multiples of 32, as the matrix unit of a processor wants them."""
    return BaseModel(model_of(request.param, _BASES[request.param], intermediate_size=96), native=False)


@pytest.fixture(scope="module")
def native(base: BaseModel) -> NativeDecoder:
    return native_of(base)


def tree_of(parents: list[int], tokens: list[int]) -> TokenTree:
    """A tree of one row, whose node 0 is the root."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    token_row, parent_row, depth_row = (torch.tensor([part]) for part in (tokens, parents, depths))
    return TokenTree(token_row, parent_row, depth_row, torch.zeros(1, len(tokens)))


def nodes_of(trees: list[TokenTree], lengths: list[int], packing: Packing | None = None, **others: Any) -> TreeNodes:
    """The trees of several rows, all of one size."""
    tokens, depths = torch.cat([tree.tokens for tree in trees]), torch.cat([tree.depths for tree in trees])
    ancestors = torch.cat([tree.ancestors(tree.size - 1) for tree in trees])
    return tree_nodes(
        tokens, torch.tensor(lengths), depths, ancestors, max(lengths) + tokens.shape[1], packing, **others
    )


TREES = [
    tree_of([0, 0, 0, 1, 1, 2, 4], [5, 6, 7, 8, 9, 10, 11]),
    tree_of([0, 0, 1, 2, 3, 4, 5], [15, 16, 17, 18, 19, 20, 21]),
    tree_of([0, 0, 0, 0, 0, 0, 0], [25, 26, 27, 28, 29, 30, 31]),
]
PROMPTS = [torch.tensor(prompt) for prompt in ([3] * 5 + list(range(30, 45)), list(range(50, 59)), [7, 8])]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


_CASES = list(product(SHAPES, (torch.float32, torch.bfloat16)))
_MAIN_CASES = [case for case in _CASES if case[1] == torch.float32 or case[0] in _BASES]


@pytest.mark.parametrize("case", slow_but(_MAIN_CASES, _CASES), ids=str)
@torch.no_grad()
def test_the_models_own_numbers(case: tuple[str, torch.dtype]) -> None:
    shape, dtype = case
    base = BaseModel(model_of(shape, dtype), native=False)
    packs = base.allow_packing()
    native = native_of(base)
    layers = (0, 2, LM_HEAD_INPUT)
    lengths = [len(prompt) for prompt in PROMPTS]
    real = torch.arange(7) < torch.tensor([[7], [4], [1]])
    results = []
    for executor in (base._model_code, native):
        cache, together = base.new_cache(4, 40), packs or executor is native
        if together:
            hidden = executor.forward(cache, prompt_nodes(1, PROMPTS, [0] * 3, layers))[1]
        else:
            nodes = [prompt_nodes(row + 1, [prompt], [0], layers) for row, prompt in enumerate(PROMPTS)]
            hidden = torch.cat([executor.forward(cache, one)[1] for one in nodes])
        for row in range(3):
            cache.move(row + 1, row, 40)
        packing = Packing.of(real) if together else None
        packed = verified(executor, cache, nodes_of(TREES, lengths, packing, hidden_layers=layers))
        whole = verified(executor, cache, nodes_of(TREES, lengths, hidden_layers=()))
        end = verified(executor, cache, prompt_nodes(0, [torch.tensor([60, 61, 62])], lengths[:1], layers, 1))
        results.append([hidden, packed[0][real], packed[1][real], whole[0], *end])
        assert whole[1].shape == (3, 7, 0)
    for ours, theirs in zip(*reversed(results), strict=True):
        close(ours, theirs)


@torch.no_grad()
def test_windows_that_begin_in_blocks_that_lie_anywhere() -> None:
    base = BaseModel(model_of("gemma2", sliding_window=37), native=False)
    texts = torch.arange(2 * 95).view(2, -1) * 31 % 97
    results = []
    for executor in (base._model_code, native_of(base)):
        cache = base.new_cache(3, 120, memory=10 * 32 * sum(base.kv_bytes_per_token))
        assert isinstance(cache.blocks, GrowingBlocks)
        hidden = []
        for start, end in pairwise((0, 10, 50, 90)):
            for row, text in enumerate(texts):
                assert cache.blocks.reserve(row, end + 7)
                hidden.append(executor.forward(cache, prompt_nodes(row, [text[start:end]], [start], LAST))[1])
        trees = verified(executor, cache, nodes_of(TREES[:2], [90, 90]))
        results.append([*hidden, *trees])
    for ours, theirs in zip(*reversed(results), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_rounding_is_that_of_single_precision(dtype: torch.dtype) -> None:
    """However a product is computed, nothing of its factors is lost: an input in two parts of bf16 would be."""
    model, exact = (model_of("llama", dtype, intermediate_size=96) for _ in range(2))
    text = torch.arange(3, 73)
    theirs, exact = model(text[None]).logits[0], exact.double()(text[None]).logits[0]
    base = BaseModel(model, native=False)
    native = native_of(base)
    for rows in (1, 5, 6, 11, 16, 17, 70):
        chain = tree_of([max(node - 1, 0) for node in range(rows)], text[:rows].tolist())
        ours = verified(native, base.new_cache(1, rows), nodes_of([chain], [0]))[0][0]
        assert (ours - exact[:rows]).abs().max() <= 3 * (theirs - exact).abs().max()


@settings(max_examples=25)
@given(data=st.data())
@torch.inference_mode()
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    base: BaseModel, native: NativeDecoder, data: st.DataObject
) -> None:
    """Alone and token by token; in a draft tree, in a batch, after a prompt read in pieces."""
    text = torch.tensor(data.draw(st.lists(st.integers(0, 96), min_size=2, max_size=30)))
    start = data.draw(st.integers(1, len(text) - 1))
    cache = base.new_cache(1, 64)
    native.forward(cache, prompt_nodes(0, [text[:start]], [0], LAST))
    plain = []
    for place in range(start, len(text)):
        root = tree_of([0], [int(text[place])])
        plain.append(torch.cat(verified(native, cache, nodes_of([root], [place])), -1)[0, 0])
        cache.commit(torch.tensor([place]), torch.zeros(1, 1, dtype=torch.long), slice(0, 1))

    rows = data.draw(st.integers(1, 4))
    row = data.draw(st.integers(0, rows - 1))
    cache = base.new_cache(rows, 64)
    cuts = sorted(data.draw(st.sets(st.integers(1, start), max_size=3)) | {0, start})
    for begin, end in pairwise(cuts):
        native.forward(cache, prompt_nodes(row, [text[begin:end]], [begin], LAST))
    # The rest of the text is a path of a tree that has a decoy after each of its nodes.
    tokens, parents, path = [int(text[start])], [0], [0]
    for token in text[start + 1 :].tolist():
        tokens += [96 - token, token]
        parents += [path[-1], path[-1]]
        path.append(len(tokens) - 1)
    tree = tree_of(parents, tokens)
    trees = [tree_of(parents, tokens[::-1])] * rows
    trees[row] = tree
    lengths = [data.draw(st.integers(0, 5)) for _ in range(rows)]
    lengths[row] = start
    accepted = torch.cat(verified(native, cache, nodes_of(trees, lengths)), -1)[row, path]
    assert torch.equal(accepted, torch.stack(plain))


@torch.inference_mode()
def test_a_row_that_is_not_finite_harms_no_other(base: BaseModel, native: NativeDecoder) -> None:
    lengths, cache = [6, 6], base.new_cache(2, 24)
    for row in range(2):
        native.forward(cache, prompt_nodes(row, [PROMPTS[0][:6]], [0], LAST))
    sound = verified(native, cache, nodes_of(TREES[:2], lengths))[0]
    for keys, _ in kv_of(cache).keys_values():
        keys[2:3] = torch.nan  # of a hybrid's layers some have none
    broken = verified(native, cache, nodes_of(TREES[:2], lengths))[0]
    assert broken[0].isnan().all()
    assert torch.equal(broken[1], sound[1])


@pytest.mark.parametrize("threads", [1, 2, 5])
@torch.inference_mode()
def test_threads_do_not_matter(base: BaseModel, native: NativeDecoder, threads: int) -> None:
    def run() -> Tensor:
        cache = base.new_cache(3, 40)
        hidden = native.forward(cache, prompt_nodes(0, PROMPTS, [0] * 3, LAST))[1]
        return torch.cat([hidden.flatten(), verified(native, cache, nodes_of(TREES, [20, 9, 2]))[0].flatten()])

    before, usual = run(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(run(), before)
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize(
    ("shape", "others", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("gemma3_text", {"hidden_activation": "relu"}, "relu"),
        ("llama", {"hidden_size": 24, "head_dim": 6}, "6 numbers"),
    ],
)
def test_what_cannot_run_natively_says_why(shape: str, others: dict[str, Any], reason: str) -> None:
    model = model_of(shape, **others)
    config = model.config.get_text_config(decoder=True)
    with pytest.raises(UnsuitableError, match=reason):
        NativeDecoder(model, decoder_of(model), config)
    assert BaseModel(model)._executor is not None


@torch.inference_mode()
def test_what_does_not_fit_is_refused_and_writes_nothing(base: BaseModel, native: NativeDecoder) -> None:
    cache = base.new_cache(1, 8)
    with pytest.raises(IndexError, match="outside the KV cache"):
        native.forward(cache, prompt_nodes(0, [PROMPTS[0][:6]], [3], LAST))
    with pytest.raises(IndexError, match="outside the vocabulary"):
        native.forward(cache, prompt_nodes(0, [torch.tensor([1, 97])], [0], LAST))
    assert not any(buffer.any() for buffer in kv_of(cache).buffers)


def test_half_precision_runs_by_the_models_own_code() -> None:
    base = BaseModel(model_of("llama").bfloat16())
    assert base._executor is base._model_code


def test_without_a_compiler_the_models_own_code_runs_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler() -> None:
        raise BuildError("there is no C++ compiler (c++)")

    monkeypatch.setattr(native_decoder, "library", no_compiler)
    base = BaseModel(model_of("llama"))
    assert base._executor is base._model_code
    assert "there is no C++ compiler" in caplog.text


def test_other_numbers_are_found_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "gated_order", lambda size: gated_order(size).flip(0))
    base = BaseModel(model_of("llama"))
    assert base._executor is base._model_code
    assert "gives other numbers" in caplog.text


@pytest.mark.parametrize(
    "shape", slow_but(["gemma3_text", "olmo2", "phi3", "qwen3_5_text", "qwen3_moe"], list(SHAPES)[6:])
)
def test_texts_of_families_are_those_of_generate(shape: str) -> None:
    """Longer than windows, with draft trees that are wrong and trees that are long."""
    base = BaseModel(model_of(shape))
    assert isinstance(base._executor, NativeDecoder)
    prompts = random_prompts(4, seed=3)
    expected = [generate_reference(base.model, prompt, 24) for prompt in prompts]
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    requests = [Request(prompt, SamplingParams(max_new_tokens=24)) for prompt in prompts]
    for drafter, least in ((AdversarialDrafter(seed=1), 0), (OracleDrafter(texts), 24)):
        found = run_engine(base, drafter, requests, max_num_seqs=3, num_draft_tokens=10)
        assert tokens_of(found) == expected
        assert sum(one.counts.num_accepted_draft_tokens for one in found) >= least


def test_a_window_that_only_one_of_them_has_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """Windows of models are longer than the texts of the proof, which are read with shorter ones."""
    model = model_of("mistral", sliding_window=100)
    assert isinstance(BaseModel(model)._executor, NativeDecoder)
    whole = {"sliding_attention": (None, None)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_decoder, "attention_kinds", lambda config: whole)
        base = BaseModel(model)
    assert base._executor is base._model_code
    assert "gives other numbers" in caplog.text


def test_a_llama_runs_natively() -> None:
    base = BaseModel(model_of("llama"))
    assert isinstance(base._executor, NativeDecoder)
    prompts = [torch.tensor(prompt) for prompt in random_prompts(2)]
    hidden = base.prefill(base.new_cache(2, 64), 0, prompts, [0, 0])
    assert hidden.shape == (sum(len(prompt) for prompt in prompts), 64)
