""""""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from drafter.ctc.losses import ctc_loss, lattice_prefix_loss, lattice_prefixes, prefix_loss, reachable
from drafter.heads.losses import Labels, hard_labels
from tests.support.enumeration import lattice_text_probabilities, prefix_probabilities, text_probabilities
from tests.support.properties import examples
from tests.support.trees import Prefix

Choices = list[dict[int, float]]
"""The labels of each place, with their weights."""


def frames_of(seed: int, rows: int, frames: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, frames, vocabulary + 1, generator=generator, dtype=torch.double)).log_softmax(-1)


def expected_prefix_loss(exact: dict[Prefix, float], text: list[int], choices: Choices) -> tuple[float, float]:
    """Total and weight of `−Σ_u 0.8^u Σ_k q_uk log(π(y_<u v_k) / π(y_<u))`, from the probability of every prefix."""
    total = weight = 0.0
    for u, labels in enumerate(choices):
        before = exact.get(tuple(text[:u]), 0.0) if u else 1.0
        for label, share in labels.items():
            now = exact.get((*text[:u], label), 0.0)
            if before > 0.0 and now > 0.0:
                total -= 0.8**u * share * math.log(now / before)
                weight += 0.8**u * share
    return total, weight


def sure(text: list[int]) -> Choices:
    """The text itself."""
    return [{label: 1.0} for label in text]


def as_labels(choices: Choices) -> Labels:
    """`[1, U, K]`, in double precision."""
    tokens = [list(labels) for labels in choices]
    probs = [list(labels.values()) for labels in choices]
    return Labels(torch.tensor([tokens]), torch.tensor([probs], dtype=torch.double))


def soft(length: int, vocabulary: int) -> st.SearchStrategy[Choices]:
    """Two labels at each place."""
    labels = st.lists(st.integers(0, vocabulary - 1), min_size=2, max_size=2, unique=True)
    place = st.tuples(labels, st.floats(0.0, 1.0)).map(lambda drawn: {drawn[0][0]: drawn[1], drawn[0][1]: 1 - drawn[1]})
    return st.lists(place, min_size=length, max_size=length)


@examples(40)
@given(seed=st.integers(0, 9999), frames=st.integers(1, 5), targets=st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_losses_equal_enumeration(seed: int, frames: int, targets: list[int]) -> None:
    """Also for repeats and for targets longer than the frames."""
    log_probs = frames_of(seed, 1, frames, 3)
    texts = text_probabilities(log_probs[0])
    lengths = torch.tensor([len(targets)])

    loss = ctc_loss(log_probs, torch.tensor([targets]), lengths)
    exact = texts.get(tuple(targets), 0.0)
    assert loss.weight.item() == (exact > 0.0)
    assert loss.total.item() == pytest.approx(-math.log(exact) if exact else 0.0)

    total, weight = expected_prefix_loss(prefix_probabilities(texts, 4), targets, sure(targets))
    for labels in (None, hard_labels(torch.tensor([targets]))):
        prefix = prefix_loss(log_probs, torch.tensor([targets]), lengths, labels=labels)
        assert prefix.total.item() == pytest.approx(total)
        assert prefix.weight.item() == pytest.approx(weight)


@examples(40)
@given(data=st.data(), seed=st.integers(0, 9999), frames=st.integers(1, 5), length=st.integers(1, 4))
def test_prefix_loss_of_soft_labels_equals_enumeration(
    data: st.DataObject, seed: int, frames: int, length: int
) -> None:
    """Also for labels that repeat the label before, and for places after a text that the frames cannot emit."""
    text = data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
    choices = data.draw(soft(length, 3))
    log_probs = frames_of(seed, 1, frames, 3)
    total, weight = expected_prefix_loss(prefix_probabilities(text_probabilities(log_probs[0]), 4), text, choices)
    loss = prefix_loss(log_probs, torch.tensor([text]), torch.tensor([length]), labels=as_labels(choices))
    assert loss.total.item() == pytest.approx(total)
    assert loss.weight.item() == pytest.approx(weight)


def test_a_label_that_the_frames_cannot_reach_is_dropped() -> None:
    """After 1, two frames can emit 2 but not 1 again, which needs a blank between."""
    log_probs = frames_of(2, 1, 2, 3)
    text, lengths = torch.tensor([[1, 2]]), torch.tensor([2])
    both = prefix_loss(log_probs, text, lengths, labels=as_labels([{1: 1.0, 0: 0.0}, {1: 0.7, 2: 0.3}]))
    pi = prefix_probabilities(text_probabilities(log_probs[0]), 2)
    assert both.total.item() == pytest.approx(-math.log(pi[1,]) - 0.8 * 0.3 * math.log(pi[1, 2] / pi[1,]))
    assert both.weight.item() == pytest.approx(1 + 0.8 * 0.3)
    third = prefix_loss(frames_of(2, 1, 3, 3), text, lengths, labels=as_labels([{1: 1.0, 0: 0.0}, {1: 0.7, 2: 0.3}]))
    assert third.weight.item() == pytest.approx(1.8)


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
    loss, two = ctc_loss(log_probs, targets, lengths), ctc_loss(log_probs[:2], targets[:2], lengths[:2])
    assert loss.weight.item() == two.weight.item() == 2
    assert loss.total.item() == pytest.approx(two.total.item())


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
    loss = ctc_loss(log_probs, targets, lengths)
    theirs = F.ctc_loss(log_probs.transpose(0, 1), targets, torch.full((5,), 8), lengths, blank=6, reduction="none")
    assert loss.weight.item() == 5
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


TARGETS, LENGTHS = torch.tensor([[1, 1, 0], [0, 2, 2], [2, 2, 2]]), torch.tensor([3, 2, 3])
SOFT = Labels(
    torch.tensor([[[1, 2], [1, 0], [0, 1]], [[0, 1], [2, 0], [2, 1]], [[2, 0], [2, 1], [2, 0]]]),
    torch.tensor([0.75, 0.25], dtype=torch.double).expand(3, 3, 2),
)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "ctc": lambda log_probs: ctc_loss(log_probs, TARGETS, LENGTHS).total,
    "prefix": lambda log_probs: prefix_loss(log_probs, TARGETS, LENGTHS).total,
    "prefix, soft": lambda log_probs: prefix_loss(log_probs, TARGETS, LENGTHS, labels=SOFT).total,
}


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients(kind: str) -> None:
    logits = torch.randn(3, 4, 4, dtype=torch.double, generator=torch.Generator().manual_seed(7), requires_grad=True)
    assert torch.autograd.gradcheck(lambda logits: LOSSES[kind](logits.log_softmax(-1)), (logits,))


def test_an_unreachable_row_has_no_gradient_and_no_nan() -> None:
    logits = torch.randn(1, 2, 3, requires_grad=True)
    loss = ctc_loss(logits.log_softmax(-1), torch.tensor([[1, 1]]), torch.tensor([2]))
    loss.total.backward()
    assert logits.grad is not None
    assert logits.grad.abs().max().item() == 0.0
    assert loss.mean().item() == 0.0


def lattice_table(seed: int, frames: int, vocabulary: int) -> Tensor:
    """`[T, V + 1 (last label; V at the start), V + 1]` log-probabilities: label context 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(frames, vocabulary + 1, vocabulary + 1, generator=generator, dtype=torch.double).log_softmax(-1)


@examples(40)
@given(
    data=st.data(),
    seed=st.integers(0, 9999),
    frames=st.integers(1, 5),
    band=st.integers(1, 4),
    target=st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
def test_lattice_equals_enumeration(data: st.DataObject, seed: int, frames: int, band: int, target: list[int]) -> None:
    """Hard labels, which are the text itself, and labels beside the text."""
    table = lattice_table(seed, frames, 2)
    texts = lattice_text_probabilities(lambda j, text: table[j - 1, text[-1] if text else 2].tolist(), frames, 2, band)
    exact = prefix_probabilities(texts, 4)
    emit, blank = lattice_inputs(table, target, band)
    prefixes = lattice_prefixes(emit, blank, frames)[1].exp()[0].tolist()
    for u in range(min(len(target), frames)):
        assert prefixes[u] == pytest.approx(exact[tuple(target[: u + 1])])
    lengths, choices = torch.tensor([len(target)]), data.draw(soft(len(target), 2))
    for labels in (sure(target), choices):
        loss = lattice_prefix_loss(emit, blank, lengths, frames, lattice_choices(table, target, labels, band))
        total, weight = expected_prefix_loss(exact, target, labels)
        assert loss.total.item() == pytest.approx(total)
        assert loss.weight.item() == pytest.approx(weight)


def lattice_rows(table: Tensor, target: list[int], band: int) -> Tensor:
    """`[1, U, B, V + 1]` log-probabilities of frame `u + 1 + i` after `u` labels; anything past the last frame."""
    frames, start = table.shape[0], table.shape[2] - 1
    before = [start, *target[:-1]]
    rows = [[table[min(u + i, frames - 1), last] for i in range(band)] for u, last in enumerate(before)]
    return torch.stack([torch.stack(row) for row in rows])[None]


def lattice_inputs(table: Tensor, target: list[int], band: int) -> tuple[Tensor, Tensor]:
    """`emit` and `blank` of the text."""
    rows = lattice_rows(table, target, band)
    index = torch.tensor(target)[None, :, None, None].expand(-1, -1, band, -1)
    return rows.gather(3, index)[..., 0], rows[..., -1]


def lattice_choices(table: Tensor, target: list[int], choices: Choices, band: int) -> tuple[Tensor, Tensor]:
    """`choices`: log-probabilities of the labels, and their weights."""
    labels = as_labels(choices)
    index = labels.tokens[:, :, None].expand(-1, -1, band, -1)
    return lattice_rows(table, target, band).gather(3, index), labels.probs


def test_padding_of_a_lattice_does_not_count() -> None:
    table = lattice_table(3, 4, 3)
    emit, blank = lattice_inputs(table, [0, 1, 2], 2)
    said, probs = lattice_choices(table, [0, 1, 2], sure([0, 1, 2]), 2)
    whole = lattice_prefix_loss(emit, blank, torch.tensor([2]), 4, (said, probs))
    short = lattice_prefix_loss(emit[:, :2], blank[:, :2], torch.tensor([2]), 4, (said[:, :2], probs[:, :2]))
    assert whole.total.item() == pytest.approx(short.total.item())
    assert whole.weight.item() == pytest.approx(1.8)


@pytest.mark.parametrize("kind", ["the text", "soft"])
def test_lattice_gradients(kind: str) -> None:
    text, choices = [0, 0, 2, 1], [{0: 0.5, 1: 0.5}, {0: 0.25, 2: 0.75}, {1: 1.0, 2: 0.0}, {1: 0.5, 0: 0.5}]
    choices = choices if kind == "soft" else sure(text)
    table = lattice_table(0, 3, 3)
    emit, blank = lattice_inputs(table, text, 2)
    said, probs = lattice_choices(table, text, choices, 2)
    inputs = tuple(tensor.clone().requires_grad_() for tensor in (emit, blank, said))

    def loss(emit: Tensor, blank: Tensor, said: Tensor) -> Tensor:
        return lattice_prefix_loss(emit, blank, torch.tensor([4]), 3, (said, probs)).total

    assert torch.autograd.gradcheck(loss, inputs)
