from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from drafter.ctc.loss import ctc_loss, lattice_prefix_loss, lattice_prefixes, prefix_loss, reachable
from tests.ctc.enumeration import lattice_text_probabilities, prefix_probabilities, text_probabilities


def frames_of(seed: int, rows: int, frames: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, frames, vocabulary + 1, generator=generator, dtype=torch.double)).log_softmax(-1)


def expected_prefix_loss(exact: dict[tuple[int, ...], float], target: list[int], decay: float) -> tuple[float, float]:
    total = weight = 0.0
    before = 1.0
    for u in range(len(target)):
        now = exact.get(tuple(target[: u + 1]), 0.0)
        if now == 0.0:
            break
        total -= decay**u * math.log(now / before)
        weight += decay**u
        before = now
    return total, weight


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 9999), frames=st.integers(1, 5), targets=st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_losses_equal_enumeration(seed: int, frames: int, targets: list[int]) -> None:
    """Repeats, and targets longer than the frames, included."""
    log_probs = frames_of(seed, 1, frames, 3)
    texts = text_probabilities(log_probs[0])
    lengths = torch.tensor([len(targets)])

    loss, masked = ctc_loss(log_probs, torch.tensor([targets]), lengths)
    exact = texts.get(tuple(targets), 0.0)
    assert masked.tolist() == [exact == 0.0]
    assert loss.weight.item() == (exact > 0.0)
    assert loss.total.item() == pytest.approx(-math.log(exact) if exact else 0.0)

    total, weight = expected_prefix_loss(prefix_probabilities(texts, 4), targets, 0.8)
    prefix = prefix_loss(log_probs, torch.tensor([targets]), lengths)
    assert prefix.total.item() == pytest.approx(total)
    assert prefix.weight.item() == pytest.approx(weight)


def test_padding_of_targets_does_not_count() -> None:
    log_probs = frames_of(1, 3, 4, 3)
    targets = torch.tensor([[1, 2, 0], [2, 2, 2], [0, 0, 0]])
    lengths = torch.tensor([3, 1, 0])
    padded = prefix_loss(log_probs, targets, lengths)
    parts = [
        prefix_loss(log_probs[:1], targets[:1], lengths[:1]),
        prefix_loss(log_probs[1:2], targets[1:2, :1], lengths[1:2]),
    ]
    assert padded.total.item() == pytest.approx(sum(part.total.item() for part in parts))
    assert padded.weight.item() == pytest.approx(1 + 0.8 + 0.64 + 1)
    loss, masked = ctc_loss(log_probs, targets, lengths)
    assert masked.tolist() == [False, False, True]
    assert loss.weight.item() == 2


def test_reachable_counts_repeats() -> None:
    targets = torch.tensor([[1, 1, 1, 2], [1, 2, 3, 4], [1, 2, 3, 4]])
    assert reachable(targets, torch.tensor([4, 4, 2]), 4).tolist() == [
        [True, True, False, False],
        [True, True, True, True],
        [True, True, False, False],
    ]


def test_agrees_with_torch() -> None:
    log_probs = frames_of(3, 5, 8, 6)
    targets = torch.randint(0, 6, (5, 4), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([4, 3, 2, 1, 4])
    loss, masked = ctc_loss(log_probs, targets, lengths)
    theirs = F.ctc_loss(log_probs.transpose(0, 1), targets, torch.full((5,), 8), lengths, blank=6, reduction="none")
    assert not bool(masked.any())
    assert loss.total.item() == pytest.approx(theirs.sum().item())


def test_without_blanks_it_is_weighted_cross_entropy() -> None:
    log_probs = frames_of(4, 2, 3, 5)
    log_probs[..., -1] = -1e4
    targets, lengths = torch.tensor([[0, 1, 2], [3, 1, 4]]), torch.tensor([3, 3])
    weights = torch.tensor([1.0, 0.5, 0.25], dtype=torch.double)
    entropy = -(log_probs.gather(2, targets[:, :, None])[..., 0] * weights).sum()
    # Repeated frames may still stretch a label, so the prefix loss can only be lower, never higher.
    assert prefix_loss(log_probs, targets, lengths, 0.5).total.item() <= entropy.item()
    one = prefix_loss(log_probs[:, :1], targets[:, :1], torch.tensor([1, 1]), 0.5)
    assert one.total.item() == pytest.approx(-log_probs[:, 0].gather(1, targets[:, :1]).sum().item())


@pytest.mark.parametrize("kind", ["ctc", "prefix"])
def test_gradients(kind: str) -> None:
    targets, lengths = torch.tensor([[1, 1, 0], [0, 2, 2], [2, 2, 2]]), torch.tensor([3, 2, 3])

    def loss(logits: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        if kind == "ctc":
            return ctc_loss(log_probs, targets, lengths)[0].total
        return prefix_loss(log_probs, targets, lengths).total

    logits = torch.randn(3, 4, 4, dtype=torch.double, generator=torch.Generator().manual_seed(7), requires_grad=True)
    assert torch.autograd.gradcheck(loss, (logits,))


def test_an_unreachable_row_has_no_gradient_and_no_nan() -> None:
    logits = torch.randn(1, 2, 3, requires_grad=True)
    loss, _ = ctc_loss(logits.log_softmax(-1), torch.tensor([[1, 1]]), torch.tensor([2]))
    loss.total.backward()
    assert logits.grad is not None
    assert logits.grad.abs().max().item() == 0.0
    assert loss.mean().item() == 0.0


def lattice_table(seed: int, frames: int, vocabulary: int) -> Tensor:
    """`[T, V + 1 (last label; V at the start), V + 1]` log-probabilities: label context 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(frames, vocabulary + 1, vocabulary + 1, generator=generator, dtype=torch.double).log_softmax(-1)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 9999),
    frames=st.integers(1, 5),
    band=st.integers(1, 4),
    target=st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
def test_lattice_equals_enumeration(seed: int, frames: int, band: int, target: list[int]) -> None:
    table = lattice_table(seed, frames, 2)
    texts = lattice_text_probabilities(lambda j, text: table[j - 1, text[-1] if text else 2].tolist(), frames, 2, band)
    exact = prefix_probabilities(texts, 4)
    emit, blank = lattice_inputs(table, target, band)
    prefixes = lattice_prefixes(emit, blank, frames)[0].exp().tolist()
    for u in range(min(len(target), frames)):
        assert prefixes[u] == pytest.approx(exact[tuple(target[: u + 1])])
    loss = lattice_prefix_loss(emit, blank, torch.tensor([len(target)]), frames)
    total, weight = expected_prefix_loss(exact, target, 0.8)
    assert loss.total.item() == pytest.approx(total)
    assert loss.weight.item() == pytest.approx(weight)


def lattice_inputs(table: Tensor, target: list[int], band: int) -> tuple[Tensor, Tensor]:
    frames, vocabulary = table.shape[0], table.shape[2] - 1
    emit = torch.zeros(1, len(target), band, dtype=table.dtype)
    blank = torch.zeros_like(emit)
    for u, label in enumerate(target):
        for i in range(band):
            row = table[min(u + i, frames - 1), target[u - 1] if u else vocabulary]
            emit[0, u, i], blank[0, u, i] = row[label], row[vocabulary]
    return emit, blank


def test_lattice_gradients() -> None:
    table = lattice_table(0, 3, 3)
    emit, blank = lattice_inputs(table, [0, 0, 2, 1], 2)
    emit.requires_grad_()
    blank.requires_grad_()
    lengths = torch.tensor([4])
    assert torch.autograd.gradcheck(lambda e, b: lattice_prefix_loss(e, b, lengths, 3).total, (emit, blank))
