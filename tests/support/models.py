"""Random small models of many families, a tokeniser that spells out ids, and a way to run an engine to its end."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from drafter import devices
from drafter.acceptance.contract import Verifier
from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.requests import Generation, Request
from drafter.target_model.architecture import transformers_loading
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree, from_nodes

DEVICE = torch.device(os.environ.get("DRAFTER_TEST_DEVICE", "cpu"))
"""Where random models are: `benchmarks.gpu` runs tests with them on a GPU."""
VOCABULARY = 97
EOS = 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_HYBRID = ["full_attention", "sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "layer_types": _HYBRID},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "layer_types": _HYBRID},
    "phi3": {},
    "gpt_neox": {},
    "gpt2": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "granite": {},
    "cohere2": {"sliding_window": 6, "layer_types": _HYBRID},
    "falcon": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "stablelm": {},
    "starcoder2": {"sliding_window": 6},
    "gpt_oss": {"head_dim": 8, "sliding_window": 6, "layer_types": _HYBRID, "num_local_experts": 4},
    "glm4": {"head_dim": 8},
    "llama4_text": {"head_dim": 8, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48},
}


@torch.inference_mode(False)  # a test may be in it: such weights are no parameters of a model as it is loaded
def random_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random causal LM of a family; large weights, so that its greedy text is not one token for ever."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES.get(family, {}), **changes})
    eager = {"attn_implementation": "eager"} if family in ("gemma2", "gpt_oss") else {}
    with transformers_loading():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager).to(DEVICE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


@cache
def base_of(family: str, seed: int = 0) -> BaseModel:
    """The target model of a family, made and proved once for all tests, which leave it as it is."""
    with torch.inference_mode(False):  # as in `random_model`
        return BaseModel(random_model(family, seed))


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Ragged prompts of 1 to 17 ids, without the special ones."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 2, 5, 9, 17]))] for _ in range(count)]


class SpellingTokenizer:
    """Decodes id 5 as ` 5`, and `<eos>` as nothing."""

    chat_template = None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" {i}" for i in ids if not (skip_special_tokens and i == EOS))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(token) for token in text.split()]


class AdversarialDrafter(Drafter):
    """Random trees, full of repeats, of the end-of-sequence token, of special tokens, of padding and of duplicates."""

    def __init__(self, seed: int, nodes: int = 11, depth: int = 5) -> None:
        self.spec, self.depth = DraftSpec(nodes, depth), depth
        self._rng = torch.Generator().manual_seed(seed)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        batch, count, size = context.tokens.shape[0], ask.nodes, ask.nodes + 1
        parents = torch.stack(
            [torch.randint(-1, max(i, 1), (batch,), generator=self._rng).clamp_max(i - 1) for i in range(count)], 1
        )
        depths = torch.ones(batch, count, dtype=torch.long)
        for i in range(count):
            known = torch.where(parents[:, i] >= 0, depths.gather(1, parents[:, i : i + 1].clamp_min(0))[:, 0], 0)
            depths[:, i] = known + 1
        kind = torch.randint(0, 4, (batch, count), generator=self._rng)
        tokens = torch.randint(0, VOCABULARY, (batch, count), generator=self._rng)
        lengths, texts = context.lengths.cpu(), context.tokens.cpu()
        recent = texts.gather(1, (lengths[:, None] - torch.arange(count) % 7).clamp_min(0))
        tokens = torch.where(kind == 0, recent, torch.where(kind == 1, EOS, torch.where(kind == 2, 0, tokens)))
        probs = -depths.double()
        drop = (torch.rand(batch, count, generator=self._rng) < 0.1) | (depths > self.depth)
        # A node whose parent does not exist does not exist either.
        for i in range(count):
            parent = parents[:, i : i + 1]
            drop[:, i] |= (parent >= 0)[:, 0] & drop.gather(1, parent.clamp_min(0))[:, 0]
        made = (tokens, parents, depths, probs.masked_fill(drop, -torch.inf))
        tokens, parents, depths, probs = (one.to(context.tokens.device) for one in made)
        return from_nodes(context.pending, tokens, parents, depths, probs, size)


class OracleDrafter(Drafter):
    """Knows the row's continuation and hides it among wrong siblings, so that long walks are sure to be tested."""

    def __init__(self, texts: list[list[int]], depth: int = 5) -> None:
        self.texts, self.depth = texts, depth
        self.spec = DraftSpec(2 * depth, depth)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        batch = context.tokens.shape[0]
        tokens = torch.zeros(batch, 2 * self.depth, dtype=torch.long)
        for row in range(batch):
            length = int(context.lengths[row])
            so_far = context.tokens[row, : length + 1].tolist()
            text = next((t for t in self.texts if t[: len(so_far)] == so_far), [])
            truth = (text[len(so_far) :] + [EOS] * self.depth)[: self.depth]
            for step, token in enumerate(truth):
                tokens[row, 2 * step] = (token + 1) % VOCABULARY
                tokens[row, 2 * step + 1] = token
        index = torch.arange(2 * self.depth)
        parents = (2 * (index // 2) - 1).expand(batch, -1)
        depths = (index // 2 + 1).expand(batch, -1)
        tokens, parents, depths = (one.to(context.tokens.device) for one in (tokens, parents, depths))
        return from_nodes(context.pending, tokens, parents, depths, -depths.float(), ask.nodes + 1)


def engine_of(base: BaseModel, drafter: Drafter, *, verifier: Verifier | None = None, **config: Any) -> Engine:
    """An engine whose texts are spelled ids."""
    return Engine(base, drafter, SpellingTokenizer(), EngineConfig(**config), verifier=verifier)


def finish(engine: Engine, handles: Iterable[Handle] = ()) -> list[Generation]:
    """Step until nothing is left to do, and return the results of requests."""
    while not engine.idle:
        engine.step()
    return [handle.result(0) for handle in handles]


def decode(engine: Engine, requests: Iterable[Request], *, stream: bool = False) -> list[Generation]:
    """Decode all requests to their ends."""
    return finish(engine, [engine.submit(request, stream=stream) for request in requests])


def run_engine(
    base: BaseModel, drafter: Drafter, requests: Iterable[Request], verifier: Verifier | None = None, **config: Any
) -> list[Generation]:
    """Decode all requests to their ends, in an engine of their own."""
    return decode(engine_of(base, drafter, verifier=verifier, **config), requests)


def tokens_of(found: Iterable[Generation]) -> list[list[int]]:
    return [one.token_ids for one in found]


def texts_of(requests: Iterable[Request], found: Iterable[Generation]) -> list[list[int]]:
    """Prompts with what follows them, as an oracle knows them."""
    return [[*request.prompt_ids, *one.token_ids] for request, one in zip(requests, found, strict=True)]


is_asynchronous = devices.is_asynchronous
_PLAIN: WeakKeyDictionary[BaseModel, dict[str, Generation]] = WeakKeyDictionary()


def plainly(base: BaseModel, requests: Sequence[Request], max_model_len: int | None = None) -> list[Generation]:
    """Decode requests plainly, each alone: what any drafter must give. Each is decoded once for a target model."""
    known, found = _PLAIN.setdefault(base, {}), []
    for request in requests:
        key = f"{max_model_len} {replace(request, request_id='')}"
        if key not in known:
            with mock.patch.object(devices, "is_asynchronous", is_asynchronous):  # on a GPU that is only played, too
                (known[key],) = run_engine(
                    base, PlainDecoding(), [request], max_num_seqs=1, max_model_len=max_model_len
                )
        found.append(replace(known[key], request_id=request.request_id))
    return found


def generate_reference(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The greedy continuation by transformers' own `generate`."""
    output = model.generate(
        torch.tensor([prompt], device=DEVICE), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def chain(tokens: list[int]) -> Tensor:
    """A tensor `[1, n]` of ids."""
    return torch.tensor([tokens])
