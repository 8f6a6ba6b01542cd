"""A draft model's trees are what the model itself says, and its memory is that of a model that has read the text."""

from __future__ import annotations

import heapq

import pytest
import torch

from drafter.drafters.contract import Ask, DraftContext, Loan
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.model_drafter import ModelDrafter
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.requests import Request, SamplingParams
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree
from tests.support.caches import kv_of
from tests.support.marks import slow_but
from tests.support.models import (
    VOCABULARY,
    base_of,
    engine_of,
    plainly,
    random_model,
    random_prompts,
    run_engine,
    tokens_of,
)
from tests.support.tapes import queue_steps
from tests.support.trees import Prefix, check_best, check_slice_contract, nodes

TEXTS = [[5, 6, 7, 8, 9, 10, 11], [40, 41], [9, 3, 60, 60, 8, 12, 90, 33, 4, 5, 5, 6]]


def context_of(texts: list[list[int]]) -> DraftContext:
    tokens = torch.zeros(len(texts), 40, dtype=torch.long)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    known = [len(text) - 1 for text in texts]
    return DraftContext(tokens, None, torch.tensor(known), known)


@torch.inference_mode()
def trees_of(drafter: ModelDrafter, base: BaseModel, ask: Ask) -> TokenTree:
    """The first trees over `TEXTS`, by rows."""
    drafter.open(Loan(base, len(TEXTS), 40, StageTimes()))
    drafter.prepare(context_of(TEXTS))
    tree = drafter.propose(context_of(TEXTS), ask)
    check_slice_contract(tree)
    return tree


@torch.inference_mode()
def after(model: BaseModel, text: list[int]) -> list[float]:
    """Log-probabilities of the next token by the model's own code, without a cache."""
    return model.model(torch.tensor([text])).logits[0, -1].log_softmax(-1).tolist()  # type: ignore[no-any-return]


def best_paths(model: BaseModel, text: list[int], count: int, depth: int) -> dict[Prefix, float]:
    """The most probable continuations of at most so many tokens, a forward each."""
    ends: list[tuple[float, Prefix]] = [(0.0, ())]
    found: dict[Prefix, float] = {}
    while len(found) <= count:
        cost, path = heapq.heappop(ends)
        found[path] = torch.tensor(-cost).exp().item()
        if len(path) < depth:
            for token, log_prob in enumerate(after(model, [*text, *path])):
                heapq.heappush(ends, (cost - log_prob, (*path, token)))
    del found[()]
    return found


@pytest.mark.parametrize("family", slow_but(["llama", "gemma2"], ["llama", "gemma2", "gpt2", "mistral", "llama4_text"]))
def test_the_best_nodes_are_found(family: str) -> None:
    """Trees of several levels, which a model as sure as this one has; texts of different lengths together."""
    weights = random_model(family, seed=1)
    with torch.no_grad():
        weights.get_output_embeddings().weight.mul_(15)
    model = BaseModel(weights)
    tree = trees_of(ModelDrafter(model, model, 12), model, Ask(12))
    assert int(tree.depths.max()) > 2
    for row, text in enumerate(TEXTS):
        check_best(nodes(tree, row, 8), best_paths(model, text, 12, 8), 13)


@pytest.mark.parametrize(
    "family", slow_but(["gpt2", "gpt_oss"], ["gpt2", "gpt_oss", "gemma2", "llama4_text", "qwen3_moe", "falcon"])
)
def test_a_node_has_the_probability_of_its_path_by_itself(family: str) -> None:
    model = base_of(family, 1)
    tree = trees_of(ModelDrafter(model, model, 10), model, Ask(10))
    for row, text in enumerate(TEXTS):
        found = nodes(tree, row, 8)
        assert len(found) == 10
        for path, probability in found.items():
            exact = sum(after(model, [*text, *path[:place]])[token] for place, token in enumerate(path))
            assert probability == pytest.approx(torch.tensor(exact).exp().item(), rel=1e-3, abs=1e-9)


def test_improbable_nodes_are_not_run_on_a_cpu() -> None:
    model = base_of("llama", 1)
    tree = trees_of(ModelDrafter(model, model, 12), model, Ask(12, least_probability=1.0))
    assert int(tree.depths.max()) == 1


def sure_model() -> BaseModel:
    """A model of which a tree of a few nodes is its greedy continuation."""
    weights = random_model("llama", seed=0)
    with torch.no_grad():
        weights.get_output_embeddings().weight.mul_(1000)
    return BaseModel(weights)


def test_the_base_accepts_all_of_what_it_drafts_itself() -> None:
    base = sure_model()
    requests = [Request(prompt, SamplingParams(20, ignore_eos=True)) for prompt in random_prompts(5, seed=2)]
    for one in run_engine(base, ModelDrafter(base, base, 4), requests, max_num_seqs=3, num_draft_tokens=4):
        assert one.counts.acceptance_histogram == [0, 0, 0, 0, 4]
        assert one.counts.num_decode_steps == 4


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_cache_is_that_of_a_model_that_has_read_the_text_alone(family: str) -> None:
    """After walks of all lengths, copies of common beginnings, and moves to other slots."""
    base = base_of(family)
    drafter = MergedDrafter(CachebackDrafter(8), member := ModelDrafter(base, base, 9))
    engine = engine_of(base, drafter, max_num_seqs=3, num_draft_tokens=9)
    beginning = [3 + place * 7 % 90 for place in range(15)]
    prompts = [*random_prompts(3, seed=8), [*beginning, 4], [*beginning, 5, 6]]
    handles = [
        engine.submit(Request(prompt, SamplingParams(6 + 5 * row, temperature=row % 2, seed=row, ignore_eos=True)))
        for row, prompt in enumerate(prompts)
    ]
    checked = 0
    while not engine.idle:
        engine.step()
        for slot in range(len(engine.scheduler.active)):
            known = min(member._entries.known[slot], int(engine.batch.lengths[slot]))
            fresh = base.new_cache(1, 64)
            base.prefill(fresh, 0, [engine.batch.tokens[slot, :known]])
            ours, wanted = kv_of(member.cache).keys_values(), kv_of(fresh).keys_values()
            first = slot * member.cache.length
            for one, other in zip(ours, wanted, strict=True):
                for found, expected in zip(one, other, strict=True):
                    assert torch.allclose(found[first : first + known], expected[:known], atol=1e-4)
            checked += known
    assert checked > 100
    assert all(handle.result(0) for handle in handles)
    assert engine.state().shared_tokens > 0


def requests_of(count: int) -> list[Request]:
    return [
        Request(prompt, SamplingParams(24, temperature=row % 2, seed=row, frequency_penalty=0.5))
        for row, prompt in enumerate(random_prompts(count, seed=4))
    ]


@pytest.mark.parametrize("family", slow_but(["llama"], ["llama", "gemma2"]))
def test_a_draft_model_can_be_part_of_a_graph(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: steps are repeated as recorded, and the host is a step behind."""
    base = sure_model() if family == "llama" else base_of(family)
    requests = [
        Request(prompt, SamplingParams(32, temperature=row % 2, seed=row, ignore_eos=True))
        for row, prompt in enumerate(random_prompts(5, seed=4))
    ]
    expected = plainly(base, requests)
    recorder = queue_steps(monkeypatch)
    drafter = ModelDrafter(base, base, 3) if family == "llama" else ModelDrafter(base, base, 6)
    assert drafter.spec.graph_safe
    found = run_engine(base, drafter, requests, max_num_seqs=3, num_draft_tokens=6)
    assert tokens_of(found) == tokens_of(expected)
    assert recorder.repeated > 10
    if family == "llama":  # it knows its own greedy continuation, however far behind the host is
        greedy = [one.counts for one in found[::2]]
        assert [one.acceptance_histogram for one in greedy] == [[0, 0, 0, 8]] * 3


@pytest.mark.parametrize("vocabulary", slow_but([VOCABULARY - 30], [VOCABULARY - 30, VOCABULARY + 30]))
def test_a_model_may_have_a_larger_or_smaller_output_than_the_base(vocabulary: int) -> None:
    """Models of one family pad their vocabularies differently."""
    base = base_of("llama")
    model = random_model("llama", seed=2)
    model.resize_token_embeddings(vocabulary)
    requests = requests_of(4)
    expected = plainly(base, requests)
    found = run_engine(base, ModelDrafter(BaseModel(model), base, 10), requests, max_num_seqs=2, num_draft_tokens=10)
    assert tokens_of(found) == tokens_of(expected)


def test_numbers_that_are_not_finite_cost_drafts_and_no_tokens() -> None:
    base, draft = base_of("gpt_neox"), BaseModel(random_model("gpt_neox", seed=2))
    with torch.no_grad():
        draft.model.get_input_embeddings().weight[7] = torch.nan
    # The third enters the slot of the second, where the first one's length is read of masked positions.
    prompts, lengths = [[20] * 30, [7] * 30, [9]], [30, 2, 12]
    requests = [
        Request(prompt, SamplingParams(length, ignore_eos=True))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    expected = plainly(base, requests)
    found = run_engine(base, ModelDrafter(draft, base, 6), requests, max_num_seqs=2, num_draft_tokens=6)
    assert tokens_of(found) == tokens_of(expected)
    assert [one.counts.num_draft_tokens > 0 for one in found] == [True, False, True]


@torch.inference_mode()
def test_more_rows_may_come_than_there_are() -> None:
    """Where shapes must repeat, empty slots are decoded with the others."""
    base = base_of("llama")
    drafter = ModelDrafter(base, base, 6)
    expected = trees_of(ModelDrafter(base, base, 6), base, Ask(6))
    drafter.open(Loan(base, len(TEXTS) + 1, 40, StageTimes()))
    drafter.prepare(context_of(TEXTS))
    found = drafter.propose(context_of([*TEXTS, [3]]), Ask(6))
    assert found.tokens[:-1].equal(expected.tokens)
