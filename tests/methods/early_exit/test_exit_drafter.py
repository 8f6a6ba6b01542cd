"""Early exit without a network: the first layers on the target model's cache give what they give by themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from drafter.drafters.contract import Ask, DraftContext, Loan, PlainDecoding
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.drafters.registry import load_drafter
from drafter.errors import LoadError
from drafter.requests import Request, SamplingParams
from drafter.statistics import StageTimes
from drafter.target_model.attention import Packing
from drafter.target_model.cache import BLOCK, SPARE
from drafter.target_model.model import BaseModel
from drafter.target_model.native_decoder import NativeDecoder
from tests.support.caches import tree_nodes
from tests.support.images import prompts_of, seeing_base
from tests.support.marks import slow_but, slow_but_tuples
from tests.support.models import FAMILIES, base_of, plainly, random_model, random_prompts, run_engine, tokens_of
from tests.support.tapes import queue_steps
from tests.support.trees import check_slice_contract, nodes

MAIN_FAMILIES = ("llama", "gemma2", "gpt2", "gpt_oss", "llama4_text")
LAYERS = 3
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]])
PARENTS = [-1, 0, 0, 1, 1, 3, 3]
DEPTHS = torch.tensor([0, 1, 1, 2, 2, 3, 3]).expand(2, -1)
PREFIXES = [list(range(20, 41)), [50, 51]]
"""Longer than any window, and reaching past a chunk; and shorter."""


@cache
def native_base(sharp: float = 1.0) -> BaseModel:
    """A base that the native decoder runs, with logits `sharp` times as large."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": LAYERS}
    config = AutoConfig.for_model(
        "llama", **sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=2, max_position_embeddings=128
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
        model.lm_head.weight.mul_(sharp)
    base = BaseModel(model)
    assert isinstance(base._executor, NativeDecoder)
    return base


def ancestors() -> Tensor:
    found = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            found[node] |= found[parent]
    return found.expand(2, -1, -1)


def path_to(node: int) -> list[int]:
    return ancestors()[0, node].nonzero()[:, 0].tolist()


@torch.inference_mode()
def logits_of(base: BaseModel, layers: int | None, packed: bool, memory: int | None) -> Tensor:
    """Logits `[2, 7, V]` after the first layers of the trees' nodes."""
    kv = base.new_cache(3, 64, memory, layers=layers)
    for row, prefix in enumerate(PREFIXES):
        assert kv.blocks.reserve(row, len(prefix) + 8)
        base.prefill(kv, row, [torch.tensor(prefix)])
    lengths = torch.tensor([len(prefix) for prefix in PREFIXES])
    packing = Packing.of(torch.ones(2, len(PARENTS), dtype=torch.bool)) if packed else None
    tree = tree_nodes(TOKENS, lengths, DEPTHS, ancestors(), 28, packing)
    logits, hidden = base.verify(kv, tree)
    alone = base.forward(kv, replace(tree, logits=False))  # again, without the LM head
    assert alone[0] is None
    assert torch.equal(alone[1], hidden)
    return logits


MAIN_EXITS = [*zip(MAIN_FAMILIES, (1, 2, LAYERS, 1, 2), strict=True), ("native", 1), ("native", 2)]
OTHER_EXITS = [("native", LAYERS), *((family, 1 + number % 2) for number, family in enumerate(FAMILIES))]
EXITS = list(dict.fromkeys([*MAIN_EXITS, *OTHER_EXITS]))


@pytest.mark.parametrize(("family", "layers"), slow_but_tuples(MAIN_EXITS, EXITS))
def test_logits_after_the_first_layers_are_those_of_each_path_by_itself(family: str, layers: int) -> None:
    """In one block of memory and in pages, packed and not."""
    base = native_base() if family == "native" else base_of(family)
    for packed, blocks in ((False, None), (base.allow_packing(), None), (False, 5)):
        memory = blocks and (blocks + SPARE) * BLOCK * base.new_cache(1, 1, layers=layers).nbytes
        found = logits_of(base, layers, packed, memory)
        for row, prefix in enumerate(PREFIXES):
            for node in range(len(PARENTS)):
                path = torch.tensor([[*prefix, *TOKENS[row, path_to(node)].tolist()]])
                scale = getattr(base.model, "logit_scale", 1.0)  # Cohere's, behind the LM head
                expected = base.lm_head(base.read_early(path, layers)[0, -1]) * scale
                assert torch.allclose(found[row, node], expected, atol=1e-3 * float(expected.abs().max()))


def test_natively_all_layers_give_the_bits_of_the_verification() -> None:
    base = native_base()
    for packed in (False, True):
        assert torch.equal(logits_of(base, LAYERS, packed, None), logits_of(base, None, packed, None))


def gib(base: BaseModel, blocks: int | None) -> float | None:
    """Memory for so many blocks, for all rows together."""
    return blocks and (blocks + SPARE) * BLOCK * base.new_cache(1, 1).nbytes / 2**30


def greedy(count: int = 7) -> list[Request]:
    return [Request(prompt, SamplingParams(24, ignore_eos=True)) for prompt in random_prompts(count, seed=5)]


def mixed(count: int = 9) -> list[Request]:
    """Greedy and random requests that enter and leave at different times."""
    return [
        Request(prompt, SamplingParams(20 - 3 * (row % 4), temperature=0.7 * (row % 2), seed=row, ignore_eos=True))
        for row, prompt in enumerate(random_prompts(count, seed=5))
    ]


@pytest.mark.parametrize("family", slow_but(["gpt2", "gpt_oss"], MAIN_FAMILIES))
def test_with_all_layers_every_greedy_draft_is_accepted(family: str) -> None:
    base = base_of(family)
    for one in run_engine(base, FirstLayersDrafter(base, LAYERS, 1), greedy(), max_num_seqs=3, num_draft_tokens=1):
        # The last step may be cut by the limit, and the first token comes with the prompt.
        assert one.counts.num_accepted_draft_tokens >= one.counts.num_draft_tokens - 1
        assert one.counts.num_decode_steps <= 1 + len(one.token_ids) / 2


@pytest.mark.parametrize("blocks", [None, 7])
def test_natively_with_all_layers_whole_paths_are_accepted(blocks: int | None) -> None:
    """A base that is sure of itself: its trees are deep. The rows' memory grows where there is little of it."""
    base = native_base(sharp=20.0)
    config: dict[str, Any] = {
        "max_num_seqs": 4,
        "num_draft_tokens": 12,
        "max_model_len": 96,
        "kv_gib": gib(base, blocks),
    }
    found = run_engine(base, FirstLayersDrafter(base, LAYERS, 12, depth=6), greedy(), **config)
    assert tokens_of(found) == tokens_of(run_engine(base, PlainDecoding(), greedy(), max_num_seqs=4))
    accepted = [depth for one in found for depth in one.counts.per_step_accepted]
    assert sum(depth >= 4 for depth in accepted) > len(accepted) / 2


@pytest.mark.parametrize(("layers", "nodes", "blocks"), [(1, 10, None), (2, "auto", None), (2, 10, 8)])
def test_the_tokens_are_those_of_plain_decoding_natively(layers: int, nodes: Any, blocks: int | None) -> None:
    base = native_base()
    config: dict[str, Any] = {
        "max_num_seqs": 4,
        "num_draft_tokens": nodes,
        "max_model_len": 96,
        "kv_gib": gib(base, blocks),
    }
    plain = plainly(base, mixed())
    for drafter in (FirstLayersDrafter(base, layers, 10), load_drafter(f"exit:{layers}+ngram", base, 10)):
        assert tokens_of(run_engine(base, drafter, mixed(), **config)) == tokens_of(plain)


@torch.inference_mode()
def test_nodes_have_the_probabilities_of_their_paths() -> None:
    """Of a tree as deep as it goes, on what the target model's whole forwards have left."""
    base = base_of("gemma2")
    drafter, kv = FirstLayersDrafter(base, 2, 150, depth=4), base.new_cache(2, 96)
    for row, prefix in enumerate(PREFIXES):
        base.prefill(kv, row, [torch.tensor(prefix)])
    drafter.open(Loan(base, 2, 64, StageTimes(), kv))
    texts, lengths = torch.zeros(2, 64, dtype=torch.long), [len(prefix) for prefix in PREFIXES]
    for row, prefix in enumerate(PREFIXES):
        texts[row, : len(prefix) + 1] = torch.tensor([*prefix, 9])
    context = DraftContext(texts, None, torch.tensor(lengths), lengths)
    drafter.prepare(context)
    tree = drafter.propose(context, Ask(150))
    check_slice_contract(tree)
    for row, prefix in enumerate(PREFIXES):
        found = nodes(tree, row, 4)
        assert max(map(len, found)) > 1
        for path, prob in found.items():
            text = torch.tensor([[*prefix, 9, *path]])
            log_probs = base.lm_head(base.read_early(text, 2)).log_softmax(-1)[0]
            told = [log_probs[len(prefix) + step, token] for step, token in enumerate(path)]
            assert prob == pytest.approx(float(sum(told, torch.tensor(0.0)).exp()), rel=1e-3)


def test_drafting_leaves_the_text_alone_and_nothing_behind_it_that_is_not_finite() -> None:
    """A draft token that is not finite is in no tree, and its keys and values would spoil all that reads past them."""
    base, bad = BaseModel(random_model("llama"), native=False), 50
    kv, text = base.new_cache(2, 64), torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    base.prefill(kv, 0, [text[0, :4]])
    base.prefill(kv, 1, [text[1, :4]])
    before = [buffer.clone() for buffer in kv.layers[0].buffers]  # type: ignore[attr-defined]

    def output(states: Tensor) -> Tensor:
        return F.one_hot(torch.tensor(bad), base.vocab_size).float().expand(*states.shape[:-1], -1) * 9

    drafter = FirstLayersDrafter(base, 2, 8, depth=4, output=output)
    drafter.open(Loan(base, 2, 32, StageTimes(), kv))
    with torch.no_grad():
        base.model.get_input_embeddings().weight[bad] = torch.nan
    lengths = torch.tensor([4, 4])
    tree = drafter.propose(DraftContext(F.pad(text, (0, 40)), None, lengths, [4, 4]), Ask(8))
    assert bad in tree.tokens[:, 1:]
    behind = kv.blocks.of(slice(0, 2), torch.arange(4, 4 + drafter.spec.run).expand(2, -1)).flatten()
    for buffer, was in zip(kv.layers[0].buffers, before, strict=True):  # type: ignore[attr-defined]
        assert bool(buffer.isfinite().all())
        members = buffer.unflatten(0, (-1, kv.blocks.places)).clone()
        members[:, behind] = 0  # where nothing had been written
        assert torch.equal(members.flatten(0, 1), was)


def test_rows_may_be_as_long_as_the_engine_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU runs a whole beam of each level. Without room behind the rows it would write into the next one's text."""
    base = base_of("llama")
    prompts = [list(range(20, 20 + size)) for size in (33, 9, 9)]
    longest = [Request(prompt, SamplingParams(41 - len(prompt), ignore_eos=True)) for prompt in prompts]
    plain = tokens_of(plainly(base, longest))
    queue_steps(monkeypatch)
    found = run_engine(
        base, FirstLayersDrafter(base, 1, 15), longest, max_num_seqs=3, num_draft_tokens=15, max_model_len=41
    )
    assert tokens_of(found) == plain


@pytest.mark.parametrize("rest", ["0", "4", "two", "", "-1", "1.0"])
def test_a_number_of_layers_that_the_base_does_not_have(rest: str) -> None:
    with pytest.raises(LoadError, match=f"'exit:{rest}': after the colon .* from 1 to 3"):
        load_drafter(f"exit:{rest}", base_of("llama"), 8)
    with pytest.raises(LoadError, match="has 3 layers, so 4 of them cannot draft"):
        FirstLayersDrafter(base_of("llama"), 4, 8)


@pytest.mark.parametrize("family", slow_but(["qwen3_vl"], ["qwen2_vl", "qwen3_vl", "paligemma-2"]))
def test_an_exit_behind_all_layers_drafts_what_the_target_model_chooses_after_images(family: str) -> None:
    """So it is at the positions of the row's tokens, which an image has moved."""
    seeing = seeing_base(family)
    requests = [Request(prompt, SamplingParams(12, ignore_eos=True)) for prompt in prompts_of(family)]
    drafter = FirstLayersDrafter(seeing, seeing.num_layers, 1)
    found = run_engine(seeing, drafter, requests, max_num_seqs=4, num_draft_tokens=1)
    assert tokens_of(found) == tokens_of(plainly(seeing, requests))
    for one in found:
        assert one.counts.num_accepted_draft_tokens == one.counts.num_draft_tokens > 0
