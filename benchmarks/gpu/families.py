"""Families: tokens of ten small models, one of which sees, by trees, from blocks and compiled, beside plain decoding.

In fp32 no token may differ. In bf16, where committed positions are read by flash attention, the share that does is what
rounding makes of near ties.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.gpu.cells import Key, Measure, Plan, Stage, Values
from drafter.drafters.registry import load_drafter
from drafter.embedded import EMBEDDED_BASE, EMBEDDED_DIGITS
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.evaluation.decoders import decode_all, differing_tokens
from drafter.prompt import Prompt, Span
from drafter.requests import Request, SamplingParams
from drafter.target_model.architecture import random_model
from drafter.target_model.loading import load_base, pick_device
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer

_VOCABULARY, _ROWS, _NODES = 512, 6, 8
_COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWS = {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 64, **_WINDOWS},
    "gpt2": {},
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 24},
    "gpt_neox": {},
    "llama4_text": {
        "head_dim": 64,
        "attention_chunk_size": 32,
        "num_local_experts": 2,
        "intermediate_size_mlp": 256,
        "floor_scale": 2048,
    },
    "falcon": {},
    "qwen3_next": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""Settings of each kind: shared KV heads or not, windows, chunks, experts, learned positions, biases, states."""
_SEES = "digits, with images"
"""The embedded model that sees, whose inputs are made here: a bare machine has no library of images."""
_WAYS = ("trees", "blocks", "compiled")


def cells(plan: Plan) -> list[Key]:
    """The kinds by the ways; compiling takes longest and comes last."""
    names = ["llama", "qwen3_next", _SEES] if plan.tiny else [*FAMILIES, _SEES]
    ways = _WAYS[:2] if plan.tiny else _WAYS
    return [
        {"family": name, "dtype": dtype, "way": way}
        for way in ways
        for name in (names[:1] if way == "compiled" else names)
        for dtype in ("float32", "bfloat16")
    ]


def _with_image(ids: list[int], seed: int) -> Prompt:
    """An image of noise and a text, as the processor of the embedded model that sees writes them."""
    config = AutoConfig.from_pretrained(EMBEDDED_DIGITS)
    place, count, size = config.image_token_id, config.image_seq_length, config.vision_config.image_size
    noise = np.random.default_rng(seed).uniform(-1, 1, (1, 3, size, size)).astype(np.float32)
    text = [place + 1 + one % (config.text_config.vocab_size - place - 1) for one in ids]
    return Prompt.of_images([*[place] * count, *text], (Span(0, count, noise.tobytes()),), {"pixel_values": noise})


def prepare(plan: Plan) -> Measure:
    """See `Stage`."""
    tokenizer, device = load_tokenizer(str(EMBEDDED_BASE)), pick_device()
    tokens = 24 if plan.tiny else 32
    drawn = random.Random(0)
    prompts = [[drawn.randrange(3, _VOCABULARY) for _ in range(length)] for length in (1, 40, 9, 300, 70, 17)]
    how = SamplingParams(tokens, ignore_eos=True)
    requests = [Request(prompt, how) for prompt in prompts[:_ROWS]]
    seeing = [Request(_with_image(prompt, seed), how) for seed, prompt in enumerate(prompts[:_ROWS])]

    def base_of(family: str, dtype: str) -> BaseModel:
        if family == _SEES:
            example = _with_image(prompts[2], _ROWS)
            base = load_base(EMBEDDED_DIGITS, dtype=dtype, device=device, eyes=lambda name, trust_remote_code: example)
            assert base.sight is not None, base.blind
            return base
        config = AutoConfig.for_model(family, **_COMMON, **FAMILIES[family])
        model = random_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
        return BaseModel(model.to(device, getattr(torch, dtype)), family)

    def decoded(base: BaseModel, drafter: str, slots: int, way: str = "trees") -> list[list[int]]:
        asked = requests if base.sight is None else seeing
        longest = max(len(one.prompt_ids) for one in asked) + tokens
        of_half = (slots // 2) * (longest + 8 * _NODES) * sum(base.kv_bytes_per_token) + slots * base.cache_bytes.slot
        room = of_half / 2**30 if way == "blocks" else None
        config = EngineConfig(slots, longest, num_draft_tokens=_NODES, kv_gib=room, compile=way == "compiled")
        engine = Engine(base, load_drafter(drafter, base, _NODES), tokenizer, config)
        return decode_all(engine, asked).outputs

    alone = cache(lambda family, dtype: decoded(base_of(family, dtype), "none", 1))

    def measure(cell: Key) -> Values:
        expected = alone(cell["family"], cell["dtype"])
        base = base_of(cell["family"], cell["dtype"])
        found = decoded(base, "ngram", _ROWS, cell["way"])
        return {
            "tokens": sum(map(len, expected)),
            "differing": sum(differing_tokens(*both) for both in zip(found, expected, strict=True)),
            "reads to length": base.reads_to_length,
        }

    return measure


def row(cell: Key, values: Values) -> dict[str, object]:
    """A row of the table."""
    return {**cell, **values, "share": f"{values['differing'] / values['tokens']:.2%}"}


STAGE = Stage(
    "families",
    "Tokens of random models that are not their plain decoding's.",
    cells,
    prepare,
    row,
    first=lambda cell: cell["way"] != "compiled",
)
