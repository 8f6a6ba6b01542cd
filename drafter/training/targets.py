"""Texts of the target model: batches with anchors, targets and labels, and β by simulated walks.

An anchor is the position of a pending token, as in decoding; a text's first one is the last prompt token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from drafter.heads.config import Tree
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch, Labels, likeliest_logits
from drafter.prompt import Prompt
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.training.settings import NODE_COUNTS
from drafter.tree.token_tree import TokenTree


@dataclass(frozen=True)
class RegeneratedText:
    """A prompt and the target model's own continuation of it."""

    tokens: Sequence[int]
    prompt_length: int  # at least 1
    hidden: Tensor | None = None  # `[len(tokens), K · d]` stored hidden states that training reads
    look: Callable[[], Prompt] | None = None  # makes the prompt of a text with images, whose arrays are large

    @property
    def anchors(self) -> range:
        """Positions of pending tokens that have at least one target."""
        return range(self.prompt_length - 1, len(self.tokens) - 1)


def count_targets(texts: Iterable[RegeneratedText], vocab_size: int) -> Tensor:
    """Count each token in the continuations of texts, `[vocab_size]` int64."""
    tokens = [token for text in texts for token in text.tokens[text.prompt_length :]]
    return torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=vocab_size)


def anchor_draws(seed: int, step: int, places: Iterable[int]) -> list[random.Random]:
    """Return the generators that draw the anchors of texts at `places` of the whole step, the same on any worker."""
    return [random.Random(f"{seed}/{step}/{place}") for place in places]


_padded = partial(pad_sequence, batch_first=True)


def draft_batch(
    texts: Sequence[RegeneratedText], depth: int, most_anchors: int, draws: Sequence[random.Random] | None = None
) -> DraftBatch:
    """Return texts, each with an anchor, as a batch with U = `depth` targets of an anchor.

    Of more than `most_anchors`, a text's generator draws some; without `draws` the first ones are taken.
    """
    chosen = []
    for row, text in enumerate(texts):
        places = list(text.anchors)
        if len(places) > most_anchors:
            places = sorted(draws[row].sample(places, most_anchors)) if draws else places[:most_anchors]
        chosen.append(torch.tensor(places))
    tokens = _padded([torch.as_tensor(text.tokens, dtype=torch.long) for text in texts])
    anchors = _padded(chosen)
    left = [(len(text.tokens) - 1 - used).clamp_max(depth) for text, used in zip(texts, chosen, strict=True)]
    after = anchors[:, :, None] + torch.arange(1, depth + 1)
    targets = F.pad(tokens, (0, depth))[:, None].expand(-1, anchors.shape[1], -1).gather(2, after)
    hidden = [text.hidden for text in texts if text.hidden is not None]
    return DraftBatch(tokens, anchors, targets, _padded(left), _padded(hidden) if len(hidden) == len(texts) else None)


@torch.no_grad()
def base_hidden_states(base: BaseModel, tokens: Tensor, layers: tuple[int, ...] = (LM_HEAD_INPUT,)) -> Tensor:
    """Return the hidden states `[B, L, K · d]` of right-padded tokens `[B, L]`; see `DraftSpec.hidden_layers`."""
    base.layers.watch(layers)
    last = base.decoder(input_ids=tokens, use_cache=False).last_hidden_state
    return base.layers.take(layers, last, base.device)


@torch.no_grad()
def teacher_labels(
    base: BaseModel, head: DraftHead, batch: DraftBatch, hidden: Tensor, count: int, temperature: float
) -> Labels:
    """Return the target model's K = `count` most probable tokens at each target as soft labels `[B, A, U, K]`.

    `hidden` `[B, L, d]` are the texts' last hidden states. With a draft vocabulary, only its tokens are ranked and
    weighted: a head cannot predict that none of them follows.

    Some model families scale or soft-cap logits after the LM head. The labels leave this out, as the heads that borrow
    the LM head do: the order of the tokens is right, but the weights are sharper or flatter.
    """
    # The state at a place gives the distribution of the next token: target u of an anchor comes from anchor + u - 1.
    depth = torch.arange(batch.targets.shape[2], device=hidden.device)
    place = (batch.anchors[:, :, None] + depth).clamp_max(hidden.shape[1] - 1)
    row = torch.arange(len(hidden), device=hidden.device)[:, None, None] * hidden.shape[1]
    # Anchors share most positions, and a prompt's are not needed.
    asked, where = (row + place).unique(return_inverse=True)
    logits, ids = likeliest_logits(head.output(base), hidden.flatten(0, 1)[asked], count)
    return Labels(head.base_tokens(ids)[where], logits.div(temperature).softmax(1)[where])


# β without decoding: walks the head's trees along text that the target model generated at temperature 0. There decoding
# would follow the text itself, so a few large forwards make the trees for all positions of many texts. Checkpoints are
# chosen by this β instead of the loss, because β decides how fast decoding is.


@dataclass
class Walks:
    """Sums over walks."""

    steps: dict[int, int]  # decode steps by number of draft tokens, initially 0 of each
    tokens: int = 0

    @property
    def beta(self) -> dict[int, float]:
        return {nodes: self.tokens / steps for nodes, steps in self.steps.items()}

    @torch.no_grad()
    def add(self, head: DraftHead, base: BaseModel, batch: DraftBatch, tree: Tree = "exact") -> None:
        """Count the walks through a batch of `walked_batches`; its hidden states begin with those the head reads."""
        batch, counts = batch.to(base.device), list(self.steps)
        if batch.hidden is None:
            hidden = base_hidden_states(base, batch.tokens, head.hidden_layers)
        else:
            hidden = batch.hidden[..., : len(head.hidden_layers) * base.hidden_size].to(base.dtype)
        trees = head.trees_at(base, batch.tokens, hidden, batch.anchors, max(counts) + 1, tree)
        accepted = accepted_depths(trees, batch.targets.flatten(0, 1), batch.lengths.flatten(), counts)
        table = accepted.view(len(counts), *batch.anchors.shape).tolist()
        for row, count in enumerate((batch.lengths > 0).sum(1).tolist()):
            self.tokens += count
            for nodes, depths in zip(counts, table, strict=True):
                at = 0
                while at < count:
                    at += depths[row][at] + 1
                    self.steps[nodes] += 1


@torch.no_grad()
def simulated_beta(
    head: DraftHead,
    base: BaseModel,
    texts: Sequence[RegeneratedText],
    node_counts: Sequence[int] = NODE_COUNTS,
    tree: Tree = "exact",
) -> dict[int, float]:
    """Return β by number of draft tokens, from greedy walks; smaller trees are leading slices of the largest."""
    training = head.training
    head.eval()
    walks = Walks(dict.fromkeys(node_counts, 0))
    for batch in walked_batches(texts, head.config.depth, at_once=4):
        walks.add(head, base, batch, tree)
    head.train(training)
    return walks.beta


def accepted_depths(tree: TokenTree, targets: Tensor, lengths: Tensor, node_counts: Sequence[int]) -> Tensor:
    """Return the accepted depth in each leading slice of each tree `[N, S]`, `[len(node_counts), N]`.

    `targets` `[N, U]` are the tokens that the target model generates after the root, `lengths` `[N]` of them valid.
    """
    slot = (tree.depths - 1).clamp_min(0)
    right = (tree.tokens == targets.gather(1, slot)) & (tree.depths <= lengths[:, None])
    right[:, 0] = True
    on_path = (right[:, None] | ~tree.ancestors()).all(2)
    depths = torch.where(on_path, tree.depths, 0)
    return torch.stack([depths[:, : count + 1].amax(1) for count in node_counts])


def walked_batches(texts: Sequence[RegeneratedText], depth: int, at_once: int) -> Iterator[DraftBatch]:
    """Yield texts as batches of `at_once` with an anchor at each position, texts of similar length together."""
    ordered = sorted((text for text in texts if len(text.anchors)), key=lambda text: len(text.tokens))
    for start in range(0, len(ordered), at_once):
        group = ordered[start : start + at_once]
        yield draft_batch(group, depth, most_anchors=max(len(text.anchors) for text in group))
