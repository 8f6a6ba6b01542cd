"""A draft model's KV cache and forward passes, and the check that its tokeniser is the target model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drafter import devices
from drafter.drafters.contract import DraftContext
from drafter.target.attention import Packing
from drafter.target.forward import TreeNodes
from drafter.target.model import BaseModel
from drafter.tree.token_tree import Frontier, TokenTree

_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ta tab\n\n\nand three lines  ",
    "In 2024 it cost $1,234.56, or 98.7 % of 3×10⁸.",
    "def f(x):\n    return {'a': x ** 2}  # don't\n",
    "Ärger über naïve Größen: ﬁne, Å, e\u0301",
    "東京は日本の首都です。 Москва — столица. 🙂👩‍👩‍👧",
)
"""Texts that tell tokenisers with the same vocabulary apart: spaces, digits, contractions, normal forms, bytes."""


def difference(theirs: Any, ours: Any) -> str | None:
    """Describe how a draft model's tokeniser differs from the target model's; None if it does not."""
    found, wanted = theirs.get_vocab(), ours.get_vocab()
    if found != wanted:
        others = sorted(token for token in found.keys() | wanted.keys() if found.get(token) != wanted.get(token))
        example = others[0]
        return (
            f"{len(others):,} of {len(wanted):,} tokens differ, such as {example!r} "
            f"({_id(found, example)} there, {_id(wanted, example)} in the target model's)"
        )
    for text in _TEXTS:
        if theirs.encode(text, add_special_tokens=False) != ours.encode(text, add_special_tokens=False):
            return f"it has the same vocabulary, but encodes {text!r} otherwise"
    return None


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "missing"


_PROMPT_TOKENS = 512
"""Prompt tokens of one forward at most."""


@dataclass(frozen=True)
class RunNodes:
    """Tree nodes that the draft model has run or is about to run, without the root.

    Args:
        tokens: `[B, R]` int64; any valid id in padding.
        depths: `[B, R]` int64 distance from the pending token.
        ancestors: `[B, R, R]` bool: entry `[b, i, j]` says that node `j` is node `i` or one of its ancestors.
    """

    tokens: Tensor
    depths: Tensor
    ancestors: Tensor

    @staticmethod
    def of(frontier: Frontier) -> RunNodes:
        """Drop the frontier's root."""
        return RunNodes(frontier.tokens[:, 1:], frontier.depths[:, 1:], frontier.ancestors[:, 1:, 1:])


class TextReader:
    """Runs a draft model over sequences, and over tree nodes behind them, with its own KV cache.

    Args:
        model: The draft model.
        base: The target model: tokens are on its device and in its vocabulary.
        fresh: Tokens that an ordinary step adds to a sequence at most.

    Attributes:
        fixed: Work depends on shapes alone, as CUDA graphs require. The host is then a step behind, and each row reads
            as many tokens as two steps may have added.
    """

    def __init__(self, model: BaseModel, base: BaseModel, fresh: int) -> None:
        self._model, self._vocabulary = model, base.vocab_size
        self.fixed = devices.is_asynchronous(base.device) and model.device == base.device
        self._usual = 2 * fresh if self.fixed else fresh
        self._cached: list[int] = []  # cached tokens per slot
        self._new = np.zeros(0, dtype=np.int64)  # tokens per row that `read` has to read
        self._packs = False

    def open(self, slots: int, length: int, nodes: int) -> None:
        """Allocate the cache for `slots` sequences of `length` positions, with `nodes` tree nodes behind them.

        Raises:
            LoadError: The device has no room for the cache.
        """
        self._behind = self._usual + nodes
        self.cache = self._model.new_cache(slots, length + self._behind + 1)
        self._packs = self._model.allow_packing()
        self._cached = [0] * slots

    def enter(self, slot: int) -> None:
        """Forget the sequence in `slot` and scrub its keys and values.

        A masked position still takes part in attention with weight zero, and zero times NaN is NaN.
        """
        if written := min(self._cached[slot] + self._behind, self.cache.length - 1) if self._cached[slot] else 0:
            start, which = (torch.full((1,), fill, device=self._model.device) for fill in (0, True))
            self.cache.scrub(start, written, which, slice(slot, slot + 1))
        self._cached[slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what is cached of the first `length` tokens of `source` to `target`."""
        known = min(self._cached[source], length)
        self.cache.copy(source, target, known)
        self._cached[target] = known

    def move(self, source: int, target: int) -> None:
        self.enter(target)
        self.copy(source, target, self._cached[source])

    def clear(self, slot: int) -> None:
        self.cache.clear(slot)

    def prepare(self, context: DraftContext) -> None:
        """Read rows that have more new tokens than an ordinary step adds; leave the others to `read`."""
        known = np.array(context.host_lengths, dtype=np.int64)
        cached = np.array(self._cached[: len(known)], dtype=np.int64)
        new = known + (context.ahead + 1) - cached
        late = new > self._usual
        if late.any():
            slots = late.nonzero()[0].tolist()
            self._read_prompts(context, [(slot, int(cached[slot]), int(known[slot])) for slot in slots])
        # `read` always reads the pending token, whose logits start the tree.
        self._new = np.where(late, 1, new.clip(1))
        self._cached[: len(known)] = (known + 1).tolist()

    def read(self, context: DraftContext, tree: TokenTree | None = None) -> Tensor:
        """Read the new tokens, and the draft nodes of a tree `[B, 1 + M]` behind them, in one forward.

        Returns:
            `[B, 1 + M, V]` log-probabilities of the next token in the target model's vocabulary; undefined at padding.
        """
        device, rows = self._model.device, len(context.tokens)
        lengths = context.lengths.to(device)[:, None]
        count = np.ones(rows, dtype=np.int64)  # where shapes must repeat, the batch may have more rows than are in use
        count[: len(self._new)] = self._new[:rows]
        chain = self._usual if self.fixed else int(count.max())
        place = torch.arange(chain, device=device)
        start = (lengths + 1 - chain).clamp_min(0)
        root = lengths - start  # index of the pending token in the chain; later entries repeat it
        tokens = context.tokens.gather(1, torch.minimum(start + place, lengths).to(context.tokens.device)).to(device)
        depths, ancestors = place.expand(rows, -1), (place <= place[:, None]).expand(rows, -1, -1)
        real = (place <= root).expand(rows, -1)
        if not self.fixed:
            new = devices.send(torch.from_numpy(count), device)
            real = real & (place > root - new[:, None])
        if tree is not None:
            nodes = tree.tokens[:, 1:]
            tokens = torch.cat([tokens, torch.where(nodes >= 0, nodes, tree.tokens[:, :1])], 1)
            depths = torch.cat([depths, root + tree.depths[:, 1:]], 1)
            text = (place <= root)[:, None].expand(-1, nodes.shape[1], -1)
            below = torch.cat([text, tree.ancestors()[:, 1:, 1:]], 2)
            ancestors = torch.cat([F.pad(ancestors, (0, nodes.shape[1])), below], 1)
            real = torch.cat([real, nodes >= 0], 1)
        packing = None if self.fixed or not self._packs or bool(real.all()) else Packing.of(real)
        reach = max(context.longest + 1, chain) + tokens.shape[1] - chain
        logits = self._run(tokens, start[:, 0], depths, ancestors, reach, packing)
        after_root = logits.gather(1, root[:, :, None].expand(-1, -1, logits.shape[2]))
        return self._log_probs(torch.cat([after_root, logits[:, chain:]], 1))

    def extend(self, context: DraftContext, tree: RunNodes, new: Tensor) -> Tensor:
        """Run the last W nodes of a tree, whose other nodes have been run, after `read`.

        Args:
            context: The rows.
            tree: R nodes per row.
            new: `[B, W]` bool: which of the last W nodes exist.

        Returns:
            `[B, W, V]` log-probabilities of the next token, as in `read`.
        """
        rows, size = tree.tokens.shape
        width = new.shape[1]
        packing = None
        if self._packs and self.fixed:
            # All of the last nodes: their positions follow from the shapes.
            place, row = (torch.arange(count, device=new.device) for count in (size, rows))
            packing = Packing(
                (row[:, None] * size + place[size - width :]).flatten(),
                row[:, None] * width + (place - (size - width)).clamp_min(0),
            )
        elif self._packs and (size > width or not bool(new.all())):
            packing = Packing.of(F.pad(new, (size - width, 0)))
        lengths = context.lengths.to(new.device) + 1
        reach = context.longest + 1 + size
        logits = self._run(tree.tokens, lengths, tree.depths - 1, tree.ancestors, reach, packing)
        return self._log_probs(logits[:, size - width :])

    def _run(
        self,
        tokens: Tensor,
        lengths: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        reach: int,
        packing: Packing | None,
    ) -> Tensor:
        """Return logits `[B, N, V']` of tree nodes; see `TreeNodes`. Clamps token ids that the draft model lacks."""
        tokens = tokens.clamp_max(self._model.vocab_size - 1)
        reach = min(reach, self.cache.length)
        nodes = TreeNodes(tokens, lengths, depths, ancestors, reach, packing, follows=packing is not None)
        return self._model.verify(self.cache, nodes)[0]

    def _log_probs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities in the target model's vocabulary; -inf where they are NaN."""
        log_probs = logits[..., : self._vocabulary].float().log_softmax(-1)
        return torch.where(log_probs.isnan(), -torch.inf, log_probs)

    def _read_prompts(self, context: DraftContext, spans: Sequence[tuple[int, int, int]]) -> None:
        """Read spans `(slot, start, stop)`; neighbouring slots share a forward."""
        pieces = [
            (slot, first, min(first + _PROMPT_TOKENS, stop))
            for slot, start, stop in spans
            for first in range(start, stop, _PROMPT_TOKENS)
        ]
        while pieces:
            count, tokens = 1, pieces[0][2] - pieces[0][1]
            for (slot, _, _), (following, start, stop) in pairwise(pieces):
                tokens += stop - start
                if following != slot + 1 or tokens > _PROMPT_TOKENS or not self._packs:
                    break
                count += 1
            some, pieces = pieces[:count], pieces[count:]
            texts = [context.tokens[slot, start:stop].to(self._model.device) for slot, start, stop in some]
            texts = [text.clamp_max(self._model.vocab_size - 1) for text in texts]
            self._model.prefill(self.cache, some[0][0], texts, [start for _, start, _ in some])
