"""Draft vocabularies: what is in them, and what they change of losses, trees and decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drafter.ctc.config import CTCHeadConfig
from drafter.ctc.head import CTCHead
from drafter.ctc.losses import prefix_loss
from drafter.drafters.contract import PlainDecoding
from drafter.errors import LoadError
from drafter.heads.checkpoint import HEADS, load_head, new_head, save_head
from drafter.heads.contract import DraftHead, DraftVocabulary, Provenance, most_frequent
from drafter.heads.losses import DraftBatch, Labels
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.training.targets import base_hidden_states, draft_batch
from tests.support.heads import DEPTH, KINDS, MAIN_KINDS, STATIC, make_head, random_texts, sequence, text_loss
from tests.support.marks import slow_but
from tests.support.models import random_prompts, run_engine, tokens_of
from tests.support.trees import check_same_trees, check_slice_contract

WHOLE = [kind for kind in KINDS if "part" not in kind]
every_kind = pytest.mark.parametrize(
    "kind", slow_but(["eagle3", *(kind for kind in MAIN_KINDS if kind in WHOLE)], WHOLE)
)
BASE_SIZE = 97


def test_the_most_frequent_tokens_come_in_the_order_of_their_ids() -> None:
    assert most_frequent(torch.tensor([3, 0, 5, 5, 1]), 3).tolist() == [0, 2, 3]
    assert most_frequent(torch.tensor([1, 1, 2, 1]), 2).tolist() == [0, 2]


def vocabulary_of(base: BaseModel, tokens: list[int]) -> DraftVocabulary:
    vocabulary = DraftVocabulary(len(tokens), BASE_SIZE)
    vocabulary.tokens.copy_(torch.tensor(tokens))
    vocabulary.borrow(base)
    return vocabulary


def test_targets_end_before_the_first_token_outside_and_labels_outside_have_no_weight(tiny_base: BaseModel) -> None:
    vocabulary = vocabulary_of(tiny_base, [7, 2, 5])
    targets = torch.tensor([[[5, 2, 9, 7], [9, 5, 5, 5], [2, 7, 5, 2]]])
    batch = DraftBatch(torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 3), targets, torch.tensor([[4, 4, 2]]))
    labels = Labels(
        torch.stack([targets, torch.full_like(targets, 3)], 3), torch.tensor([0.75, 0.25]).expand(1, 3, 4, 2)
    )
    told, told_labels = vocabulary.in_draft_ids(batch, labels)
    assert told.lengths.tolist() == [[2, 0, 2]]
    inside = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert told.targets[0][inside].tolist() == [2, 1, 0, 2, 2, 2, 1, 0, 2, 1]
    assert torch.equal(told_labels.tokens[0, ..., 0], told.targets[0])
    assert torch.equal(told_labels.probs[0, ..., 0], 0.75 * inside)
    assert not told_labels.probs[..., 1].any()


def test_the_rows_are_the_bases(tiny_base: BaseModel) -> None:
    vocabulary = vocabulary_of(tiny_base, [7, 2, 5])
    hidden = torch.randn(4, tiny_base.hidden_size)
    assert torch.allclose(vocabulary.lm_head(hidden), tiny_base.lm_head(hidden)[:, [7, 2, 5]], atol=1e-6)
    assert list(vocabulary.parameters()) == []
    assert list(vocabulary.state_dict()) == ["tokens"]


@torch.no_grad()
def permuted(base: BaseModel, head: DraftHead, seed: int) -> DraftHead:
    """The same head with a draft vocabulary of all tokens, in another order."""
    values = {**vars(head.config), "draft_vocab_size": BASE_SIZE}
    other = HEADS[head.algorithm](head.config_class(**values))
    other.load_state_dict(head.state_dict(), strict=False)
    assert other.vocabulary is not None
    order = torch.randperm(BASE_SIZE, generator=torch.Generator().manual_seed(seed))
    other.vocabulary.tokens.copy_(order)
    other.vocabulary.borrow(base)
    for weight in other.parameters():
        for dim, size in enumerate(weight.shape):
            if size == BASE_SIZE:  # a head's own outputs
                weight.copy_(weight.index_select(dim, order))
    return other.eval().requires_grad_(False)


@every_kind
@settings(max_examples=3)
@given(seed=st.integers(0, 1000))
def test_the_whole_vocabulary_in_another_order_changes_nothing(tiny_base: BaseModel, kind: str, seed: int) -> None:
    head = make_head(tiny_base, kind, seed)
    other = permuted(tiny_base, head, seed)
    tokens, hidden = sequence(tiny_base, 2, 16, seed, head.hidden_layers)
    anchors = torch.tensor([[3, 9], [0, 15]])
    for tree in ("exact", "static") if kind in STATIC else ("exact",):
        ours, theirs = (one.trees_at(tiny_base, tokens, hidden, anchors, 9, tree) for one in (head, other))
        check_same_trees(ours, theirs, DEPTH)
    batch = draft_batch(random_texts(2), DEPTH, 16)
    assert text_loss(other, tiny_base, batch).total.item() == pytest.approx(
        text_loss(head, tiny_base, batch).total.item(), rel=1e-4
    )


@every_kind
@settings(max_examples=4)
@given(size=st.integers(1, BASE_SIZE), seed=st.integers(0, 1000))
def test_nothing_outside_is_drafted(tiny_base: BaseModel, kind: str, size: int, seed: int) -> None:
    """Also where the text has tokens from outside, and where the vocabulary is smaller than a tree."""
    counts = torch.randint(0, 9, (BASE_SIZE,), generator=torch.Generator().manual_seed(seed))
    algorithm, own = KINDS[kind]
    head = new_head(algorithm, tiny_base, {"depth": DEPTH, **own, "draft_vocab_size": size}, counts).eval()
    allowed = {-1, *most_frequent(counts, size).tolist()}
    tokens, hidden = sequence(tiny_base, 2, 16, seed, head.hidden_layers)
    with torch.no_grad():
        for tree in ("exact", "static") if kind in STATIC else ("exact",):
            drafted = head.trees_at(tiny_base, tokens, hidden, torch.tensor([[3, 9], [0, 15]]), 9, tree)
            check_slice_contract(drafted)
            assert torch.equal(drafted.tokens[:, 0].view(2, 2), tokens.gather(1, torch.tensor([[3, 9], [0, 15]])))
            assert set(drafted.tokens[:, 1:].flatten().tolist()) <= allowed


@pytest.mark.parametrize("kind", slow_but(["ctc", "hydra"], ["ctc", "context 2", "medusa", "hydra"]))
def test_decoding_is_lossless_with_a_third_of_the_vocabulary(tiny_base: BaseModel, kind: str) -> None:
    """The base still generates what is outside, and prompts have it."""
    head = make_head(tiny_base, kind, draft_vocab_size=32)
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=24, temperature=0.7 * (i % 2), seed=i, ignore_eos=True), str(i))
        for i, prompt in enumerate(random_prompts(5))
    ]
    plain = run_engine(tiny_base, PlainDecoding(), requests, max_num_seqs=3, max_model_len=64)
    drafted = run_engine(
        tiny_base, head.drafter(tiny_base, 8), requests, max_num_seqs=3, max_model_len=64, num_draft_tokens=8
    )
    assert tokens_of(drafted) == tokens_of(plain)
    assert max(token for one in plain for token in one.token_ids) >= 32
    assert sum(one.counts.num_draft_tokens for one in drafted) > 0


def test_the_prefix_loss_is_that_of_the_frames_over_the_draft_vocabulary(tiny_base: BaseModel) -> None:
    """Up to the first token that no tree can have."""
    head = make_head(tiny_base, "ctc", draft_vocab_size=60)
    assert isinstance(head, CTCHead)
    batch = draft_batch(random_texts(1), DEPTH, 16)
    hidden = base_hidden_states(tiny_base, batch.tokens)
    states = head.module(tiny_base.embed(batch.tokens), hidden, batch.anchors)[0]
    log_probs = head.log_probs(states, lambda states: tiny_base.lm_head(states)[..., :60])
    reached = (batch.targets[0] < 60).long().cumprod(1).sum(1).minimum(batch.lengths[0])
    assert 0 < int((reached == 0).sum()) < len(reached)
    expected = prefix_loss(log_probs, batch.targets[0].clamp_max(59), reached)
    loss = text_loss(head, tiny_base, batch)
    assert loss.total.item() == pytest.approx(expected.total.item(), rel=1e-4)
    assert loss.weight.item() == pytest.approx(expected.weight.item())


@pytest.mark.parametrize("kind", ["medusa", "ctc, cross-entropy"])
def test_cross_entropy_leaves_out_the_places_outside_alone(tiny_base: BaseModel, kind: str) -> None:
    head = make_head(tiny_base, kind, draft_vocab_size=60)
    batch = draft_batch(random_texts(1), DEPTH, 16)
    hidden = base_hidden_states(tiny_base, batch.tokens)
    states = head.module(tiny_base.embed(batch.tokens), hidden, batch.anchors)[0]  # type: ignore[operator]
    said = (
        tiny_base.lm_head(head.norm(states))[..., :60].log_softmax(-1)
        if isinstance(head, CTCHead)
        else head.log_probs(states)  # type: ignore[operator]
    )
    inside = (batch.targets[0] < 60) & (torch.arange(DEPTH) < batch.lengths[0, :, None])
    terms = said.gather(2, batch.targets[0].clamp_max(59)[..., None])[..., 0]
    weights = inside * 0.8 ** torch.arange(DEPTH)
    loss = text_loss(head, tiny_base, batch)
    assert loss.total.item() == pytest.approx(-(terms * weights).sum().item(), rel=1e-4)
    assert loss.weight.item() == pytest.approx(weights.sum().item())


def test_a_text_of_tokens_outside_teaches_nothing(tiny_base: BaseModel) -> None:
    batch = draft_batch(random_texts(1), DEPTH, 4)
    batch = DraftBatch(batch.tokens, batch.anchors, torch.full_like(batch.targets, 96), batch.lengths)
    for kind in KINDS:
        head = make_head(tiny_base, kind, draft_vocab_size=90)
        loss = text_loss(head, tiny_base, batch)
        assert (loss.total.item(), loss.weight.item(), loss.mean().item()) == (0.0, 0.0, 0.0)


def saved_head(base: BaseModel, folder: Path) -> DraftHead:
    counts = torch.arange(BASE_SIZE) % 7
    own = {"num_heads": 2, "intermediate_size": 40, "draft_vocab_size": 30}
    head = new_head("ctc", base, own, counts)
    head.provenance = Provenance("base", base.fingerprint)
    save_head(head, folder)
    return head


def test_the_map_is_saved_and_the_rows_are_not(tiny_base: BaseModel, tmp_path: Path) -> None:
    head = saved_head(tiny_base, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["vocabulary.tokens"].tolist() == most_frequent(torch.arange(BASE_SIZE) % 7, 30).tolist()
    assert set(tensors) == {"vocabulary.tokens", *dict(head.named_parameters())}
    loaded = load_head(tmp_path, tiny_base)
    assert loaded.config == head.config
    assert loaded.vocabulary is not None
    assert head.vocabulary is not None
    for name, buffer in head.vocabulary.named_buffers():
        assert torch.equal(loaded.vocabulary.get_buffer(name), buffer), name


@pytest.mark.parametrize("token", [BASE_SIZE, -1, 8])
def test_a_damaged_map_is_refused(tiny_base: BaseModel, tmp_path: Path, token: int) -> None:
    """A token that the base does not have, or one that is there twice."""
    saved_head(tiny_base, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["vocabulary.tokens"][:2] = torch.tensor([8, token])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match="draft vocabulary must be different tokens from 0 to 96"):
        load_head(tmp_path, tiny_base)


@every_kind
def test_a_head_without_one_is_as_it_was(tiny_base: BaseModel, kind: str) -> None:
    head = make_head(tiny_base, kind)
    assert head.vocabulary is None
    assert head.output(tiny_base) is tiny_base
    assert head.state_dict().keys() == dict(head.named_parameters()).keys()


@pytest.mark.parametrize("size", [0, -5, BASE_SIZE + 1])
def test_sizes_that_do_not_fit_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"draft_vocab_size must be from 1 to .* 97, not {size}"):
        CTCHeadConfig(32, BASE_SIZE, num_heads=2, draft_vocab_size=size)


def test_without_counts_there_is_nothing_to_choose_by(tiny_base: BaseModel) -> None:
    with pytest.raises(ValueError, match="give token_counts"):
        new_head("medusa", tiny_base, {"draft_vocab_size": 9})
