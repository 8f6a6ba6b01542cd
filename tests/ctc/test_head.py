"""The head, and that decoding gives it exactly what training gave it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafter.base_model import BaseModel
from drafter.drafters.contract import DraftContext
from drafter.drafters.ctc import CTCDrafter, CTCHead, CTCHeadConfig
from drafter.drafters.plain import PlainDecoding
from drafter.requests import Request, SamplingParams
from drafter.token_tree import TokenTree
from drafter.training.objectives import base_hidden_states
from tests.ctc.enumeration import check_slice_contract, nodes
from tests.models import random_prompts, run_engine


def make_head(base: BaseModel, seed: int = 0, **settings: object) -> CTCHead:
    torch.manual_seed(seed)
    config = CTCHeadConfig(
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        **{"num_frames": 5, "depth": 4, "num_heads": 2, "intermediate_size": 40, "joint_size": 24, **settings},  # type: ignore[arg-type]
    )
    head = CTCHead(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head.eval().requires_grad_(False)


def sequence(base: BaseModel, rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens `[rows, length]` and the base's hidden states of them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, base.vocab_size, (rows, length), generator=generator)
    return tokens, base_hidden_states(base, tokens)


def same_trees(first: TokenTree, second: TokenTree, depth: int) -> bool:
    """Equal up to rounding, which may swap nodes of nearly equal price, at the end even in and out of the tree."""
    for row in range(first.tokens.shape[0]):
        ours, theirs = nodes(first, row, depth), nodes(second, row, depth)
        least = max(min(ours.values()), min(theirs.values()))
        for prefix in ours.keys() | theirs.keys():
            if abs(ours.get(prefix, least) - theirs.get(prefix, least)) > 1e-4:
                return False
    return torch.equal(first.tokens[:, 0], second.tokens[:, 0])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("label_context", [0, 1, 2])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000))
def test_decoding_sees_what_training_saw(tiny_base: BaseModel, layers: int, label_context: int, seed: int) -> None:
    """Rows advance by random strides, are refilled and moved; each tree equals the one of the training forward."""
    head = make_head(tiny_base, seed, num_layers=layers, label_context=label_context)
    slots, length = 3, 60
    tokens, hidden = sequence(tiny_base, 6, length, seed)
    drafter = CTCDrafter(head, tiny_base, tree_size=9)
    drafter.allocate(slots, length)
    rng = random.Random(seed)
    rows = [0, 1, 2]  # the sequence in each slot
    lengths = [rng.randrange(0, 40) for _ in rows]
    for slot in range(slots):
        drafter.admit(slot)
    for step in range(6):
        if step == 2:  # a new request in slot 1
            rows[1], lengths[1] = 4, rng.randrange(0, 30)
            drafter.admit(1)
        if step == 4:  # slot 0 ends; the last row takes its place
            rows[0], lengths[0] = rows.pop(), lengths.pop()
            drafter.move(2, 0)
        # What lies beyond a row's length is stale: make sure that nobody reads it.
        stale = torch.arange(length) >= torch.tensor(lengths)[:, None]
        context = DraftContext(
            torch.where(stale & (torch.arange(length) > torch.tensor(lengths)[:, None]), 1, tokens[rows]),
            torch.where(stale[..., None], 1e3, hidden[rows]),
            torch.tensor(lengths),
            list(lengths),
        )
        tree = drafter.propose(context)
        check_slice_contract(tree)
        anchors = torch.tensor(lengths)[:, None]
        assert same_trees(tree, head.trees_at(tiny_base, tokens[rows], hidden[rows], anchors, 9), 4)
        lengths = [min(at + rng.choice([1, 2, 5, 9]), length - 1) for at in lengths]


def test_many_anchors_at_once_equal_one_at_a_time(tiny_base: BaseModel) -> None:
    head = make_head(tiny_base)
    tokens, hidden = sequence(tiny_base, 2, 20)
    embeddings = tiny_base.embed(tokens)
    anchors = torch.tensor([[0, 3, 19, 7], [5, 5, 1, 18]])
    together = head.frames_at(embeddings, hidden, anchors)
    for index in range(4):
        alone = head.frames_at(embeddings, hidden, anchors[:, index : index + 1])
        assert torch.allclose(together[:, index], alone[:, 0], atol=1e-5)


def test_frames_never_see_the_future(tiny_base: BaseModel) -> None:
    """Later tokens, and the hidden states of the pending token and after, move no frame; earlier ones do."""
    head = make_head(tiny_base)
    tokens, hidden = sequence(tiny_base, 1, 16)
    anchors = torch.tensor([[6]])
    frames = head.frames_at(tiny_base.embed(tokens), hidden, anchors)
    later_tokens, later_hidden = tokens.clone(), hidden.clone()
    later_tokens[:, 7:] = 5
    later_hidden[:, 6:] += 100.0
    assert torch.equal(frames, head.frames_at(tiny_base.embed(later_tokens), later_hidden, anchors))
    for position in (0, 6):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 90
        assert not torch.allclose(frames, head.frames_at(tiny_base.embed(changed), hidden, anchors), atol=1e-5)
    hidden[:, 5] = -hidden[:, 5]
    assert not torch.allclose(frames, head.frames_at(tiny_base.embed(tokens), hidden, anchors), atol=1e-6)


def test_every_frame_sees_every_other(tiny_base: BaseModel) -> None:
    head = make_head(tiny_base)
    tokens, hidden = sequence(tiny_base, 1, 10)
    before = head.frames_at(tiny_base.embed(tokens), hidden, torch.tensor([[4]]))
    head.slots[-1] *= -1.0
    after = head.frames_at(tiny_base.embed(tokens), hidden, torch.tensor([[4]]))
    assert bool(((before - after).abs().amax(-1) > 1e-6).all())


def test_log_probs_are_normalised_and_the_blank_starts_improbable(tiny_base: BaseModel) -> None:
    config = CTCHeadConfig(hidden_size=32, vocab_size=97, num_heads=2)
    log_probs = CTCHead(config).log_probs(torch.randn(2, 8, 32), tiny_base.lm_head)
    assert log_probs.shape == (2, 8, 98)
    assert log_probs.logsumexp(-1).abs().max().item() < 1e-5
    assert log_probs[0, 0, -1].exp().item() == pytest.approx(0.0474, abs=1e-3)


@pytest.mark.parametrize("tree", ["exact", "static"])
@pytest.mark.parametrize("slots", [1, 3])
def test_the_engine_says_the_same_with_the_head(tiny_base: BaseModel, tree: str, slots: int) -> None:
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=12, temperature=0.7 * (i % 2), seed=i), str(i))
        for i, prompt in enumerate(random_prompts(7))
    ]
    head = make_head(tiny_base)
    plain = run_engine(tiny_base, PlainDecoding(), requests, slots=slots, max_length=64)
    drafter = CTCDrafter(head, tiny_base, tree_size=9, tree=tree)  # type: ignore[arg-type]
    drafted = run_engine(tiny_base, drafter, requests, slots=slots, max_length=64, nodes=8)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert sum(one.counts.num_draft_tokens for one in drafted) > 0


def test_the_cache_is_allocated_once(tiny_base: BaseModel) -> None:
    drafter = CTCDrafter(make_head(tiny_base), tiny_base, tree_size=9)
    drafter.allocate(2, 40)
    place = drafter._cache.data_ptr()
    tokens, hidden = sequence(tiny_base, 2, 40)
    for length in (3, 9, 20, 39):
        drafter.propose(DraftContext(tokens, hidden, torch.tensor([length, 3]), [length, 3]))
    assert drafter._cache.data_ptr() == place


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_heads": 5}, "even width"),
        ({"depth": 9}, "depth is at most"),
        ({"label_context": 3}, "label_context"),
        ({"label_context": 1, "loss": "ctc"}, "prefix"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CTCHeadConfig(hidden_size=32, vocab_size=97, **wrong)  # type: ignore[arg-type]


def test_static_tree_needs_frames_without_labels(tiny_base: BaseModel) -> None:
    with pytest.raises(ValueError, match="label_context 0"):
        CTCDrafter(make_head(tiny_base, label_context=1), tiny_base, tree="static")
