"""What holds for every draft head: decoding computes what training computed, and no tree or loss sees the future."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.ctc.head import CTCHead
from drafter.drafters.contract import Ask, DraftContext, Loan
from drafter.drafters.merged import MergedDrafter
from drafter.heads.checkpoint import HEADS, load_head, save_head
from drafter.heads.config import Tree
from drafter.heads.contract import Provenance
from drafter.heads.losses import DraftBatch, hard_labels
from drafter.requests import Request, SamplingParams
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from drafter.training.loop import TorchOptimiser, TrainingStep
from drafter.training.settings import TrainingSettings
from drafter.training.targets import base_hidden_states, draft_batch, simulated_beta
from drafter.tree.token_tree import TokenTree
from tests.support.heads import (
    DEPTH,
    KINDS,
    MAIN_KINDS,
    STATIC,
    make_head,
    random_texts,
    sequence,
    text_loss,
    untrained_head,
)
from tests.support.marks import slow_but, slow_but_tuples
from tests.support.models import OracleDrafter, plainly, random_prompts, run_engine, tokens_of
from tests.support.slots import enter, move
from tests.support.trees import check_same_trees, check_slice_contract, nodes

every_kind = pytest.mark.parametrize("kind", slow_but(MAIN_KINDS, KINDS))
CHAINS = [kind for kind, (algorithm, _) in KINDS.items() if algorithm == "ctc"]
TREES: list[tuple[str, Tree]] = [
    *((kind, "exact") for kind in KINDS),
    *((kind, "static") for kind in STATIC),
    *((kind, "chain") for kind in CHAINS),
]
MAIN_TREES = [*((kind, "exact") for kind in MAIN_KINDS), ("ctc", "static"), ("medusa", "static"), ("ctc", "chain")]
every_tree = pytest.mark.parametrize(("kind", "tree"), slow_but_tuples(MAIN_TREES, TREES))


def test_every_algorithm_is_tested() -> None:
    by_themselves = {"imitation"}  # reads the base's KV instead of its hidden states: tests/methods/imitation
    assert {algorithm for algorithm, _ in KINDS.values()} | by_themselves == set(HEADS)


@every_kind
@settings(max_examples=6)
@given(seed=st.integers(0, 1000))
def test_decoding_sees_what_training_saw(tiny_base: BaseModel, kind: str, seed: int) -> None:
    """Rows advance by random strides, are refilled and moved; each tree, large or small, equals the one of the training
    forward.
    """
    head = make_head(tiny_base, kind, seed)
    slots, length = 3, 60
    tokens, hidden = sequence(tiny_base, 6, length, seed, head.hidden_layers)
    drafter = head.drafter(tiny_base, 8)
    drafter.open(Loan(tiny_base, slots, length, StageTimes()))
    rng = random.Random(seed)
    rows = [0, 1, 2]  # the sequence in each slot
    lengths = [rng.randrange(0, 40) for _ in rows]
    for slot in range(slots):
        enter(drafter, slot)
    for step in range(6):
        if step == 2:  # a new request in slot 1
            rows[1], lengths[1] = 4, rng.randrange(0, 30)
            enter(drafter, 1)
        if step == 4:  # slot 0 ends; the last row takes its place
            rows[0], lengths[0] = rows.pop(), lengths.pop()
            move(drafter, 2, 0)
        # What lies beyond a row's length is stale: make sure that nobody reads it.
        place, pending = torch.arange(length), torch.tensor(lengths)[:, None]
        context = DraftContext(
            torch.where(place > pending, 1, tokens[rows]),
            torch.where((place >= pending)[..., None], 1e3, hidden[rows]),
            torch.tensor(lengths),
            list(lengths),
        )
        drafter.prepare(context)
        size = 3 if step % 2 else 9
        tree = drafter.propose(context, Ask(size - 1))
        check_slice_contract(tree)
        check_same_trees(tree, head.trees_at(tiny_base, tokens[rows], hidden[rows], pending, size), DEPTH)
        lengths = [min(at + rng.choice([1, 2, 5, 9]), length - 1) for at in lengths]


@pytest.mark.parametrize("kind", ["ctc", "eagle3", "hydra++"])
def test_in_an_engine_a_head_sees_what_training_saw(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Rows commit long paths, end, and move to other slots; each tree equals the one of the training forward."""
    head = make_head(tiny_base, kind)
    drafter = head.drafter(tiny_base, 8)
    propose = drafter.propose

    def checked(context: DraftContext, ask: Ask) -> TokenTree:
        tree = propose(context, ask)
        lengths = context.lengths[:, None]
        tokens = torch.where(torch.arange(context.tokens.shape[1]) > lengths, 1, context.tokens)
        hidden = base_hidden_states(tiny_base, tokens, head.hidden_layers)
        check_same_trees(tree, head.trees_at(tiny_base, tokens, hidden, lengths, ask.nodes + 1), DEPTH)
        return tree

    monkeypatch.setattr(drafter, "propose", checked)
    requests = [
        Request(prompt, SamplingParams(26 - 4 * row, ignore_eos=True)) for row, prompt in enumerate(random_prompts(6))
    ]
    expected = tokens_of(plainly(tiny_base, requests))
    texts = [[*one.prompt_ids, *text] for one, text in zip(requests, expected, strict=True)]
    both = MergedDrafter(drafter, OracleDrafter(texts, DEPTH))
    found = run_engine(tiny_base, both, requests, max_num_seqs=3, max_model_len=64, num_draft_tokens=8)
    assert tokens_of(found) == expected
    assert sum(one.counts.num_accepted_draft_tokens for one in found) > 40


@every_tree
def test_trees_never_see_the_future(tiny_base: BaseModel, kind: str, tree: Tree) -> None:
    """Later tokens, and hidden states from the pending token on, change no node. The hidden state before it does."""
    head = make_head(tiny_base, kind)
    tokens, hidden = sequence(tiny_base, 2, 16, layers=head.hidden_layers)
    anchors = torch.tensor([[6], [9]])
    drafted = head.trees_at(tiny_base, tokens, hidden, anchors, 9, tree)
    check_slice_contract(drafted)
    later = torch.arange(16) > anchors
    future = torch.where(later, 5, tokens), torch.where((later | (torch.arange(16) == anchors))[..., None], 9.0, hidden)
    unmoved = head.trees_at(tiny_base, *future, anchors, 9, tree)
    assert all(torch.equal(value, getattr(unmoved, name)) for name, value in vars(drafted).items())
    hidden[0, 5] *= -1.0
    moved = head.trees_at(tiny_base, tokens, hidden, anchors, 9, tree)
    assert not torch.allclose(moved.log_probs[0], drafted.log_probs[0])
    assert torch.equal(moved.log_probs[1], drafted.log_probs[1])


@every_kind
def test_the_loss_of_a_place_never_sees_that_place_or_later(tiny_base: BaseModel, kind: str) -> None:
    """A head whose loss depends on its own label, or on later text, learns nothing that decoding can use.

    The labels stay; the text changes from the last place that counts on, and so do the base's states there. In the
    paper's loss the text is the label, so there it changes one place later.
    """
    head = make_head(tiny_base, kind)
    texts = random_texts(2)
    whole = draft_batch(texts, DEPTH, 1)
    hidden = sequence(tiny_base, 2, whole.tokens.shape[1], layers=head.hidden_layers)[1]
    labels = hard_labels(whole.targets)
    place = torch.arange(whole.tokens.shape[1])
    for count in range(1, DEPTH + 1):
        kept = count if "paper" in kind else count - 1
        batch = replace(whole, lengths=torch.full_like(whole.lengths, count))
        future = place > whole.anchors + kept
        targets = torch.where(torch.arange(DEPTH) < kept, whole.targets, (whole.targets + 1) % 90)
        other = replace(batch, tokens=torch.where(future, 5, batch.tokens), targets=targets)
        moved = torch.where((place >= whole.anchors)[..., None], 9.0, hidden)
        loss, same = head(tiny_base, batch, hidden, labels), head(tiny_base, other, moved, labels)
        assert loss.total.item() > 0.0
        assert torch.equal(loss.total, same.total)
        assert torch.equal(loss.weight, same.weight)


@pytest.mark.parametrize(
    "kind",
    slow_but([kind for kind in MAIN_KINDS if "paper" not in kind], [kind for kind in KINDS if "paper" not in kind]),
)
def test_a_nodes_probability_is_what_the_loss_makes_of_its_path(tiny_base: BaseModel, kind: str) -> None:
    """With all places of the same weight, the loss of a text is its negative log prefix probability."""
    head = make_head(tiny_base, kind, depth_decay=1.0)
    tokens, hidden = sequence(tiny_base, 1, 8, layers=head.hidden_layers)
    anchors = torch.tensor([[5]])
    found = nodes(head.trees_at(tiny_base, tokens, hidden, anchors, 150), 0, DEPTH)
    deepest = sorted(found, key=len)[-8:]
    assert len(deepest[-1]) > 1
    for path in deepest:
        targets = torch.tensor([[[*path, *[0] * (DEPTH - len(path))]]])
        batch = DraftBatch(tokens, anchors, targets, torch.tensor([[len(path)]]))
        loss = head(tiny_base, batch, hidden, hard_labels(targets))
        assert math.exp(-loss.total.item()) == pytest.approx(found[path], rel=1e-3)


@every_kind
def test_anchors_that_are_padding_do_not_count(tiny_base: BaseModel, kind: str) -> None:
    head = make_head(tiny_base, kind)
    texts = [*random_texts(1, 14), *random_texts(1, 6)]
    together = text_loss(head, tiny_base, draft_batch(texts, DEPTH, 16))
    apart = [text_loss(head, tiny_base, draft_batch([text], DEPTH, 16)) for text in texts]
    assert together.total.item() == pytest.approx(sum(part.total.item() for part in apart), rel=1e-4)
    assert together.weight.item() == pytest.approx(sum(part.weight.item() for part in apart))


@every_kind
def test_all_of_the_head_trains_and_nothing_of_the_base(tiny_base: BaseModel, kind: str) -> None:
    head = make_head(tiny_base, kind).requires_grad_().train()
    text_loss(head, tiny_base, draft_batch(random_texts(2), DEPTH, 16)).mean().backward()
    still = [name for name, p in head.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert still == []
    assert all(parameter.grad is None for parameter in tiny_base.model.parameters())


@every_kind
def test_a_head_learns_a_text_by_heart(tiny_base: BaseModel, kind: str) -> None:
    head = untrained_head(tiny_base, kind)
    training = TrainingSettings(steps=60, learning_rate=0.04, warmup_steps=5, clip=10.0)
    optimiser = TorchOptimiser(TrainingStep(tiny_base, head, training), training)
    texts = random_texts(2)
    batch = draft_batch(texts, DEPTH, 16)
    before = simulated_beta(head, tiny_base, texts, (8,))[8]
    losses = [optimiser.update([batch]).loss for _ in range(training.steps)]
    assert losses[-1] < 0.5 * losses[0]
    # Depth 4 bounds a step at five tokens.
    assert before < 1.5 < 2.0 < simulated_beta(head, tiny_base, texts, (8,))[8] <= 5.0
    assert head.training


@every_tree
def test_the_engines_tokens_stay_those_of_plain_decoding(tiny_base: BaseModel, kind: str, tree: Tree) -> None:
    """Greedy and sampled requests, in a batch that is refilled."""
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=12, temperature=0.7 * (i % 2), seed=i), str(i))
        for i, prompt in enumerate(random_prompts(7))
    ]
    plain = plainly(tiny_base, requests, max_model_len=64)
    drafter = make_head(tiny_base, kind).drafter(tiny_base, 8, tree)
    drafted = run_engine(tiny_base, drafter, requests, max_num_seqs=3, max_model_len=64, num_draft_tokens=8)
    assert tokens_of(drafted) == tokens_of(plain)
    assert sum(one.counts.num_draft_tokens for one in drafted) > 0


@pytest.mark.parametrize("kind", [kind for kind, (_, settings) in KINDS.items() if settings.get("label_context")])
@torch.no_grad()
def test_a_prepared_search_finds_the_same_tree(
    tiny_base: BaseModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that are prepacked or laid out for the native library, as in an engine."""
    head = make_head(tiny_base, kind)
    states = torch.randn(3, head.config.num_frames, tiny_base.hidden_size)
    assert isinstance(head, CTCHead)
    recent = torch.randint(0, tiny_base.vocab_size, (3, head.recent_tokens))
    monkeypatch.setattr("drafter.target_model.prepacked._SMALL", 0)
    for tree in ("exact", "chain"):
        expected = head.search(states, recent, tiny_base, 9, tree)
        check_same_trees(head.prepared_search(tiny_base, tree)(states, recent, 9, 0.0), expected, DEPTH)


@every_kind
def test_a_saved_head_is_the_same_head(tiny_base: BaseModel, kind: str, tmp_path: Path) -> None:
    head = make_head(tiny_base, kind)
    head.provenance = Provenance("base", tiny_base.fingerprint)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, tiny_base)
    assert type(loaded) is type(head)
    assert loaded.config == head.config
    tokens, hidden = sequence(tiny_base, 2, 12, layers=head.hidden_layers)
    anchors = torch.tensor([[3, 8], [0, 11]])
    ours, theirs = (one.trees_at(tiny_base, tokens, hidden, anchors, 9) for one in (head, loaded))
    assert all(torch.equal(value, getattr(theirs, name)) for name, value in vars(ours).items())


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(STATIC)))
def test_heads_that_know_the_path_have_no_static_tree(tiny_base: BaseModel, kind: str) -> None:
    head = make_head(tiny_base, kind)
    with pytest.raises(ValueError, match="static tree needs"):
        head.drafter(tiny_base, 8, "static")
    with pytest.raises(ValueError, match="static tree needs"):
        head.trees_at(
            tiny_base, *sequence(tiny_base, 1, 8, layers=head.hidden_layers), torch.tensor([[3]]), 9, "static"
        )


@pytest.mark.parametrize("kind", CHAINS)
@torch.no_grad()
def test_a_chain_is_the_trees_most_probable_path(tiny_base: BaseModel, kind: str) -> None:
    head = make_head(tiny_base, kind)
    tokens, hidden = sequence(tiny_base, 2, 12, layers=head.hidden_layers)
    anchors = torch.tensor([[3, 8], [0, 11]])
    tree = head.trees_at(tiny_base, tokens, hidden, anchors, 33)
    chain = head.trees_at(tiny_base, tokens, hidden, anchors, DEPTH + 1, "chain")
    assert chain.depths.tolist() == [list(range(DEPTH + 1))] * 4
    first = tree.first_children()
    for row in range(4):
        path, node = [], 0
        while (node := int(first[row, node])) < tree.size:
            path.append(int(tree.tokens[row, node]))
        assert path
        assert chain.tokens[row, 1 : len(path) + 1].tolist() == path


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(CHAINS)))
def test_other_heads_have_no_chain_beside_their_tree(tiny_base: BaseModel, kind: str) -> None:
    with pytest.raises(ValueError, match="only a CTC head drafts a chain"):
        make_head(tiny_base, kind).drafter(tiny_base, 8, "chain")
