"""The imitation network behind an exit: it trains, drafts what training showed it, and starts as no network at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from drafter.drafters.contract import Ask, DraftContext, Loan, PlainDecoding
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.drafters.registry import load_drafter
from drafter.errors import LoadError
from drafter.heads.checkpoint import new_head, save_head
from drafter.heads.contract import DraftHead, Provenance
from drafter.heads.losses import hard_labels
from drafter.methods.imitation.head import ImitationHead
from drafter.requests import Request, SamplingParams
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.training.loop import TorchOptimiser, TrainingStep
from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText, base_hidden_states, draft_batch, simulated_beta
from tests.support.heads import COUNTS, random_texts
from tests.support.models import generate_reference, random_model, random_prompts, run_engine, tokens_of
from tests.support.trees import check_same_trees, check_slice_contract

DEPTH = 4
LAYERS = (0, LM_HEAD_INPUT)
"""Hidden states that the network of one layer learns from."""


def head_of(base: BaseModel, **settings: Any) -> ImitationHead:
    torch.manual_seed(0)
    head = new_head("imitation", base, {"layers": 1, "depth": DEPTH, "inner_size": 48, **settings}, COUNTS)
    assert isinstance(head, ImitationHead)
    return head


def perturbed(head: ImitationHead) -> ImitationHead:
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head.eval().requires_grad_(False)


def answers(base: BaseModel, count: int, length: int = 20) -> list[RegeneratedText]:
    """Texts that the base itself says."""
    prompts = random_prompts(count, seed=4)
    return [RegeneratedText([*p, *generate_reference(base.model, p, length)], len(p)) for p in prompts]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "llama4_text"])
def test_trees_of_a_text_are_those_of_decoding(family: str) -> None:
    """Each place's tree, grown with others and in any order, is the one of an engine that has read so far."""
    base = BaseModel(random_model(family))
    head = perturbed(head_of(base, layers=2, draft_vocab_size=60))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 97, (2, 24), generator=generator)
    anchors = torch.stack([torch.arange(0, 24), torch.randperm(24, generator=generator)])  # more than grow at once
    found = head.trees_at(base, tokens, torch.empty(0), anchors, 9)
    check_slice_contract(found)
    drafter = head.drafter(base, 8)
    for row, place in ((0, 0), (0, 5), (0, 23), (1, 0), (1, 7), (1, 20)):
        at = int(anchors[row, place])
        kv = base.new_cache(1, 96)
        if at:
            base.prefill(kv, 0, [tokens[row, :at]])
        drafter.open(Loan(base, 1, 64, StageTimes(), kv))
        context = DraftContext(tokens[row : row + 1, : at + 1], None, torch.tensor([at]), [at])
        drafter.prepare(context)
        mine = slice(row * 24 + place, row * 24 + place + 1)
        ours = type(found)(*(part[mine] for part in vars(found).values()))
        check_same_trees(ours, drafter.propose(context, Ask(8)), DEPTH)


def test_an_untrained_network_is_no_network(tiny_base: BaseModel) -> None:
    requests = [Request(prompt, SamplingParams(16)) for prompt in random_prompts(5)]
    with_one = run_engine(
        tiny_base, head_of(tiny_base).eval().drafter(tiny_base, 8), requests, max_num_seqs=3, num_draft_tokens=8
    )
    without = run_engine(
        tiny_base, FirstLayersDrafter(tiny_base, 1, 8, DEPTH), requests, max_num_seqs=3, num_draft_tokens=8
    )
    assert [one.counts.per_step_accepted for one in with_one] == [one.counts.per_step_accepted for one in without]


def test_the_loss_by_hand(tiny_base: BaseModel) -> None:
    """Cosine, distillation and cross-entropy; what would be rejected weighs more."""
    head = perturbed(head_of(tiny_base, rejected_weight=5.0))
    batch = draft_batch(random_texts(2), DEPTH, 6)
    hidden = base_hidden_states(tiny_base, batch.tokens, LAYERS)
    total, weight, rejections = 0.0, 0.0, 0
    for row in range(2):
        for place, count in zip(batch.anchors[row].tolist(), batch.lengths[row].tolist(), strict=True):
            if not count:
                continue
            state = head.network(hidden[row, place, : tiny_base.hidden_size])
            last = hidden[row, place, tiny_base.hidden_size :]
            log_probs = tiny_base.lm_head(state).log_softmax(-1)
            best = tiny_base.lm_head(last).topk(32)
            rejected = int(log_probs.argmax()) != int(best.indices[0])
            loss = 1 - F.cosine_similarity(state, last, dim=0)
            loss = loss - (best.values.softmax(0) * log_probs[best.indices]).sum()
            loss = loss - log_probs[batch.tokens[row, place + 1]]
            total, weight = total + (5.0 if rejected else 1.0) * float(loss), weight + (5.0 if rejected else 1.0)
            rejections += rejected
    found = head(tiny_base, batch, hidden, hard_labels(batch.targets))
    assert 0 < rejections < batch.lengths.gt(0).sum()
    assert found.total.item() == pytest.approx(total, rel=1e-3)
    assert found.weight.item() == pytest.approx(weight)
    other = replace(batch, tokens=torch.cat([batch.tokens, torch.full((2, 3), 5)], 1))  # later text does not matter
    longer = torch.cat([hidden, torch.ones(2, 3, hidden.shape[2])], 1)
    assert head(tiny_base, other, longer, hard_labels(batch.targets)).total.item() == pytest.approx(total, rel=1e-3)


def test_the_parts_of_the_loss_have_weights(tiny_base: BaseModel) -> None:
    """A label that the draft vocabulary lacks has no part in it."""
    names, batch = ("cosine_weight", "distillation_weight", "label_weight"), draft_batch(random_texts(2), DEPTH, 6)
    hidden, labels = base_hidden_states(tiny_base, batch.tokens, LAYERS), hard_labels(batch.targets)

    def loss(**weights: float) -> float:
        head = perturbed(head_of(tiny_base, draft_vocab_size=50, **{**dict.fromkeys(names, 0.0), **weights}))
        return float(head(tiny_base, batch, hidden, labels).total)

    parts = [loss(**{name: 1.0}) for name in names]
    assert loss(**dict(zip(names, (0.5, 2.0, 3.0), strict=True))) == pytest.approx(
        0.5 * parts[0] + 2.0 * parts[1] + 3.0 * parts[2], rel=1e-4
    )
    head, expected = perturbed(head_of(tiny_base, draft_vocab_size=50, rejected_weight=1.0)), 0.0
    for row, anchor in (batch.lengths > 0).nonzero().tolist():
        place = int(batch.anchors[row, anchor])
        state = head.network(hidden[row, place, : tiny_base.hidden_size])
        label = int(batch.targets[row, anchor, 0])
        if label < 50:  # equal counts keep the lowest ids
            expected -= float(tiny_base.lm_head(state)[:50].log_softmax(-1)[label])
    assert 0 < expected == pytest.approx(loss(label_weight=1.0, rejected_weight=1.0), rel=1e-3)


def train(head: DraftHead, base: BaseModel, texts: list[RegeneratedText], steps: int) -> list[float]:
    settings = TrainingSettings(steps=steps, learning_rate=0.01, warmup_steps=5, clip=10.0)
    optimiser = TorchOptimiser(TrainingStep(base, head, settings), settings)
    batch = draft_batch(texts, DEPTH, 40)
    return [optimiser.update([batch]).loss for _ in range(steps)]


def test_a_trained_network_drafts_better_than_none(tiny_base: BaseModel) -> None:
    """On the base's own answers, and β in decoding is the simulated one."""
    texts, head = answers(tiny_base, 6), head_of(tiny_base)
    before = simulated_beta(head, tiny_base, texts, (8,))[8]
    losses = train(head, tiny_base, texts, 60)
    after = simulated_beta(head, tiny_base, texts, (8,))[8]
    assert losses[-1] < 0.8 * losses[0]  # the base's own entropy is left
    assert after > before + 0.5
    assert all(bool(parameter.grad is None) for parameter in tiny_base.model.parameters())
    requests = [
        Request(list(one.tokens[: one.prompt_length]), SamplingParams(len(one.tokens) - one.prompt_length))
        for one in texts
    ]
    drafter = head.eval().requires_grad_(False).drafter(tiny_base, 8)
    found = run_engine(tiny_base, drafter, requests, max_num_seqs=1, num_draft_tokens=8)
    assert tokens_of(found) == [list(one.tokens[one.prompt_length :]) for one in texts]
    decoded = sum(len(one.token_ids) for one in found) / sum(one.counts.num_decode_steps for one in found)
    assert decoded == pytest.approx(after, rel=0.15)  # a text's first token comes with its prompt


def test_all_of_the_network_trains(tiny_base: BaseModel) -> None:
    head = perturbed(head_of(tiny_base)).requires_grad_().train()
    batch = draft_batch(random_texts(2), DEPTH, 16)
    hidden = base_hidden_states(tiny_base, batch.tokens, LAYERS)
    head(tiny_base, batch, hidden, hard_labels(batch.targets)).mean().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.abs().sum() > 0) for parameter in head.parameters())


def test_a_saved_head_decodes_to_plain_tokens(tiny_base: BaseModel, tmp_path: Path) -> None:
    head = perturbed(head_of(tiny_base))
    head.provenance = Provenance("base", tiny_base.fingerprint)
    save_head(head, tmp_path)
    requests = [
        Request(prompt, SamplingParams(12, temperature=0.7 * (row % 2), seed=row))
        for row, prompt in enumerate(random_prompts(7))
    ]
    plain = tokens_of(run_engine(tiny_base, PlainDecoding(), requests, max_num_seqs=3))
    for name in (str(tmp_path), f"{tmp_path}+ngram"):
        drafter = load_drafter(name, tiny_base, 8)
        assert drafter.spec.bytes_per_token == 0
        assert tokens_of(run_engine(tiny_base, drafter, requests, max_num_seqs=3, num_draft_tokens=8)) == plain


def test_what_an_imitation_head_refuses(tiny_base: BaseModel) -> None:
    with pytest.raises(LoadError, match=r"'imitation' reads layer 3 of its target model, .* has 3 layers"):
        head_of(tiny_base, layers=4)
    with pytest.raises(LoadError, match="rejected_weight must be at least 0"):
        head_of(tiny_base, rejected_weight=-1.0)
    with pytest.raises(LoadError, match=r"one of cosine_weight, .* must be more than 0, or nothing is learned"):
        head_of(tiny_base, cosine_weight=0.0, distillation_weight=0.0, label_weight=0.0)
    with pytest.raises(ValueError, match="exact tree only"):
        head_of(tiny_base).drafter(tiny_base, 8, "static")
