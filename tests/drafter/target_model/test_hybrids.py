"""Models with recurrent layers are decoded as `generate` does, by every drafter and in every setting of the engine."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.drafters.model_drafter import ModelDrafter
from drafter.engine.memory import plan_memory, slot_length
from drafter.errors import LoadError
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.target_model.state_cache import StateCache
from drafter.target_model.tree_scan import TreeScan
from tests.support.exhaustion import run_out
from tests.support.hybrids import HYBRIDS, hybrid_base, hybrid_model
from tests.support.marks import pairwise, slow_but
from tests.support.models import (
    AdversarialDrafter,
    OracleDrafter,
    decode,
    engine_of,
    generate_reference,
    random_prompts,
    run_engine,
    tokens_of,
)

MAIN = ("lfm2", "qwen3_5_text")
NEW = 12


@cache
def greedy(family: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, one of them of one token and two of them equal, and how `generate` continues them."""
    prompts = [[5], *random_prompts(5, seed=3)]
    prompts[3] = prompts[1] = [*range(10, 31)]
    return prompts, [generate_reference(hybrid_base(family).model, prompt, NEW) for prompt in prompts]


def requests_of(family: str, **settings: Any) -> list[Request]:
    return [Request(prompt, SamplingParams(NEW, **settings)) for prompt in greedy(family)[0]]


def oracle(family: str) -> Drafter:
    return OracleDrafter([prompt + text for prompt, text in zip(*greedy(family), strict=True)])


@pytest.mark.parametrize("family", slow_but(MAIN, HYBRIDS))
def test_greedy_equals_generate(family: str) -> None:
    for drafter in (oracle(family), AdversarialDrafter(0)):
        # Three slots for six requests: slots are refilled while others decode.
        found = run_engine(hybrid_base(family), drafter, requests_of(family), max_num_seqs=3, num_draft_tokens=10)
        assert tokens_of(found) == greedy(family)[1]
        if isinstance(drafter, OracleDrafter):
            assert sum(one.counts.num_accepted_draft_tokens for one in found) > 20


@pytest.mark.parametrize(("family", "streamed"), pairwise(2, [*MAIN, "granitemoehybrid", "mamba"], [False, True]))
def test_prompts_are_read_in_chunks(family: str, streamed: bool) -> None:
    """Those of streams end with a plain step, whose state is not committed with the prompt's."""
    base = hybrid_base(family)
    prompts = [[*range(3, 45)], [*range(50, 73)], [9, 8, 7]]
    expected = [generate_reference(base.model, prompt, 8) for prompt in prompts]
    engine = engine_of(base, AdversarialDrafter(2), max_num_seqs=2, num_draft_tokens=6)
    engine.scheduler.chunk = 8
    assert (
        tokens_of(decode(engine, [Request(prompt, SamplingParams(8)) for prompt in prompts], stream=streamed))
        == expected
    )


@pytest.mark.parametrize("family", slow_but(MAIN[:1], [*MAIN, "mamba"]))
def test_equal_prompts_are_read_once(family: str) -> None:
    """One that differs before the 256th token shares nothing."""
    base, prompt = hybrid_base(family), [*range(20, 40)]
    prompts = [prompt, prompt, [*prompt[:15], 9, 9], prompt]
    expected = [generate_reference(base.model, prompt, 12) for prompt in prompts]
    for streamed in (False, True):
        engine = engine_of(base, AdversarialDrafter(3), max_num_seqs=4, num_draft_tokens=8)
        assert (
            tokens_of(decode(engine, [Request(prompt, SamplingParams(12)) for prompt in prompts], stream=streamed))
            == expected
        )
        assert engine.state().shared_tokens == 2 * (len(prompt) - 1)


@pytest.mark.parametrize("family", slow_but(MAIN[1:], [*MAIN, "granitemoehybrid", "kimi_linear", "jamba"]))
def test_prompts_that_begin_alike_share_what_comes_before_a_snapshot(family: str) -> None:
    """Jamba's layers read on token by token, and so stop at the end of a forward alone, here at the 512th token."""
    base = BaseModel(hybrid_model(family, max_position_embeddings=700))
    beginning, *ends = [
        torch.randint(5, base.vocab_size, (size,), generator=torch.Generator().manual_seed(size)).tolist()
        for size in (600, 20, 31, 43)
    ]
    prompts = [[*beginning, *end] for end in ends]
    alone = [run_engine(base, PlainDecoding(), [Request(prompt, SamplingParams(8))])[0].token_ids for prompt in prompts]
    assert alone == [generate_reference(base.model, prompt, 8) for prompt in prompts]
    engine = engine_of(base, AdversarialDrafter(4), max_num_seqs=4, num_draft_tokens=8)
    assert tokens_of(decode(engine, [Request(prompt, SamplingParams(8)) for prompt in prompts])) == alone
    assert engine.state().shared_tokens == 2 * 512
    assert engine.state().prefilled_tokens == sum(map(len, prompts)) - len(prompts) - 2 * 512


def test_the_state_of_a_prompt_stays_while_its_text_grows() -> None:
    base = hybrid_base(MAIN[1])
    kept, prompt = base.new_cache(3, 64), torch.arange(5, 15)
    with torch.inference_mode():
        base.prefill(kept, 0, [prompt])
        assert kept.copy(0, 1, 9) == 0
        base.prefill_last(kept, 0, torch.tensor([20, 21]), 10)
        kept.move(0, 2, 12)
        assert kept.copy(2, 1, 64) == 11
        logits, _ = base.prefill_last(kept, 1, torch.tensor([33]), 11)
        whole = base.model(input_ids=torch.tensor([[*prompt.tolist(), 20, 33]]), use_cache=False).logits[0, -1]
    assert torch.allclose(logits[0], whole, atol=1e-3)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", ["prefill_last", "verify", "commit"])
def test_a_step_that_fails_leaves_the_states_from_before_it(
    monkeypatch: pytest.MonkeyPatch, stage: str, late: bool
) -> None:
    """Before or after it has written; half of the rows are preempted, and come back."""
    family = MAIN[0]
    base = hybrid_base(family)
    engine = engine_of(base, oracle(family), max_num_seqs=5, num_draft_tokens=10)
    owner = engine.batch.cache if stage == "commit" else base
    monkeypatch.setitem(vars(owner), stage, run_out(getattr(owner, stage), {2, 4}, late=late))
    assert tokens_of(decode(engine, requests_of(family), stream=True)) == greedy(family)[1]
    assert engine.state().preemptions > 0


def test_a_text_that_is_not_finite_spoils_no_other_and_not_the_next_in_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = MAIN[1]
    base = hybrid_base(family)
    real, calls = base.verify, 0

    def poisoned(cache: Any, nodes: Any) -> Any:
        nonlocal calls
        calls += 1
        logits, hidden = real(cache, nodes)
        if calls == 3:  # one row's states become NaN with its logits
            logits[1] = torch.nan
            for _, kept in cache.layers[1].kept:
                kept.unflatten(0, nodes.tokens.shape)[1] = torch.nan
            for states in cache.layers[1].nodes.values():
                for key, after in states.items():
                    states[key] = lambda row, node, after=after: after(row, node).index_fill(
                        0, torch.tensor(1), torch.nan
                    )
        return logits, hidden

    monkeypatch.setattr(base, "verify", poisoned)
    found = run_engine(base, oracle(family), requests_of(family), max_num_seqs=3, num_draft_tokens=10)
    assert tokens_of(found) == greedy(family)[1]


@pytest.mark.parametrize("family", slow_but(["granitemoehybrid"], ["granitemoehybrid", "qwen3_5_text", "qwen3_next"]))
def test_a_family_of_hybrids_may_have_attention_alone(family: str) -> None:
    base = BaseModel(hybrid_model(family, layer_types=["full_attention"] * 4))
    prompts = [[5], [*range(10, 31)]]
    expected = [generate_reference(base.model, prompt, NEW) for prompt in prompts]
    requests = [Request(prompt, SamplingParams(NEW)) for prompt in prompts]
    found = run_engine(base, AdversarialDrafter(5), requests, max_num_seqs=2, num_draft_tokens=10)
    assert tokens_of(found) == expected
    assert (base.cache_bytes.slot, base.cache_bytes.node) == (0, 0)


def test_what_cannot_run_recurrent_layers_says_so() -> None:
    base = hybrid_base(MAIN[0])
    with pytest.raises(LoadError, match="cannot draft"):
        ModelDrafter(base, base, 4)
    with pytest.raises(LoadError, match="leave compile out"):
        base.compile()
    with pytest.raises(LoadError, match="recurrent states of 64 slots"):
        base.new_cache(64, 64, memory=1)


def storages(kept: object) -> dict[int, int]:
    """Return the bytes of the numbers, by address, that what a mixer keeps of nodes holds on to."""
    if isinstance(kept, Tensor):
        return {kept.untyped_storage().data_ptr(): kept.untyped_storage().nbytes()} if kept.is_floating_point() else {}
    if isinstance(kept, partial):
        parts: list[object] = [kept.func, *kept.args]
    elif isinstance(kept, dict):
        parts = list(kept.values())
    elif isinstance(kept, TreeScan):
        parts = list(vars(kept).values())
    else:
        closure = getattr(kept, "__closure__", None) or ()
        parts = [getattr(kept, "__self__", None), *(cell.cell_contents for cell in closure)]
    return {address: size for part in parts if part is not None for address, size in storages(part).items()}


@pytest.mark.parametrize(
    "family", slow_but(["lfm2", "qwen3_next"], ["lfm2", "qwen3_next", "kimi_linear", "granitemoehybrid", "mamba"])
)
def test_the_plan_counts_all_states_that_there_are(family: str) -> None:
    """Two of each slot, the snapshots, that of an empty text, and those from which a step's nodes go on."""
    base, slots, nodes = hybrid_base(family), 3, 8
    counts = base.cache_bytes
    settings: dict[str, Any] = {"max_num_seqs": slots, "num_draft_tokens": nodes, "kept_rows": 2}
    engine = engine_of(base, AdversarialDrafter(0, nodes=nodes), **settings)
    states = next(layer for layer in engine.batch.cache.layers if isinstance(layer, StateCache))
    buffers = sum(state.untyped_storage().nbytes() for layer in states.buffers.values() for state in layer.values())
    assert buffers == counts.slot * (slots + 2) + counts.once
    prompts = [[*range(10, 20 + row)] for row in range(slots)]
    for prompt in prompts:
        engine.submit(Request(prompt, SamplingParams(30, ignore_eos=True)))
    kept = []
    while not engine.idle:
        engine.step()
        kept.append(sum(storages(states.nodes).values()) + sum(some.nbytes for _, some in states.kept))
    planned = counts.node * slots * (nodes + 1) + counts.row * slots
    assert 0.9 * planned <= max(kept) <= planned
    plan = plan_memory(base, engine.drafter.spec, engine.config, 64, 0)
    length = slot_length(64, nodes, engine.drafter.spec.max_depth)
    assert plan.items["KV cache"] == buffers + planned + counts.position * (slots + 2) * length
