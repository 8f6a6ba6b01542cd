"""Draft trees from smaller models with the target's tokeniser: one (SpecInfer, arXiv 2305.09781), or a stack of them.

In a stack (hierarchical speculative decoding, HSD, arXiv 2510.19705) each model scores the tree of the drafter below in
one forward, adds its own best continuations, and passes on the best nodes of all. The target model verifies the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drafter import devices
from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Loading, Loan, MergedDrafter
from drafter.drafters.names import kind_and_rest, merged_names
from drafter.drafters.slots import SlotTensors
from drafter.drafters.target import Target
from drafter.errors import LoadError
from drafter.methods.draft_models import model_and_device, stack_levels
from drafter.target.attention import Packing
from drafter.target.forward import TreeNodes
from drafter.target.loading import load_base, pick_device
from drafter.target.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from drafter.tree.token_tree import Frontier, TokenTree, best_first_trie, from_nodes, most_places, root_only

_DEPTH = 8
"""Deepest level of a tree; each costs a forward of the draft model."""
_WIDTH = 16
"""Nodes run per level. Trees with more draft nodes may not be optimal."""
_PROMPT_TOKENS = 512  # of one forward at most
LOWER_NODES = 2
"""Nodes asked of the lower drafter for each one passed on."""
_OWN_CHILDREN = 4  # continuations that the model adds to each node


class TextReader(Drafter):
    """Runs a draft model over sequences, and over tree nodes behind them, with its own KV cache. Proposes only roots.

    With `fixed`, work depends on shapes alone, as CUDA graphs require. The host is then a step behind, and each row
    reads as many tokens as two steps may have added.

    Args:
        model: The draft model, with the target model's tokeniser, on any device.
        base: The target model: tokens are on its device and in its vocabulary.
        run: Tree nodes that are run behind a sequence at most.
    """

    def __init__(self, model: BaseModel, base: Target, nodes: int, depth: int, run: int) -> None:
        self._model, self._vocabulary = model, base.vocab_size
        beside = model.device == base.device
        kept = sum(model.kv_bytes_per_token) if beside else 0
        self.spec = DraftSpec(nodes, depth, graph_safe=beside, bytes_per_token=kept)
        self.fixed = devices.is_asynchronous(base.device) and beside
        self._usual = 2 * (depth + 1) if self.fixed else depth + 1  # new tokens of an ordinary step at most
        self._run_nodes = run

    def open(self, loan: Loan) -> None:
        """Allocate the cache; raise `LoadError` if the device has no room for it."""
        self._times = loan.times
        self.cache = self._model.new_cache(loan.slots, loan.length + self._usual + self._run_nodes + 1)
        self._entries = SlotTensors(self.cache.by_slot(), self._usual, self._run_nodes)
        self.slots = [self._entries]
        self._packs = self._model.allow_packing()

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        return root_only(context.pending)

    def prepare(self, context: DraftContext) -> None:
        """Read rows that have more new tokens than an ordinary step adds; leave the others to `read`."""
        late, unread = self._entries.advance(context)
        lengths, spans = context.host_lengths, []
        for slot, count in zip(late.tolist(), unread.tolist(), strict=True):
            spans.append((slot, lengths[slot] + context.ahead + 1 - count, lengths[slot]))
        self._read_prompts(context, spans)

    def read(self, context: DraftContext, tree: TokenTree | None = None) -> Tensor:
        """Read the new tokens, and the draft nodes of a tree `[B, 1 + M]` behind them, in one forward.

        Returns log-probabilities `[B, 1 + M, V]` in the target model's vocabulary; undefined at padding.
        """
        device, rows = self._model.device, len(context.tokens)
        lengths = context.lengths.to(device)[:, None]
        count = np.ones(rows, dtype=np.int64)  # where shapes must repeat, the batch may have more rows than are in use
        count[: len(self._entries.new)] = self._entries.new[:rows]
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

    def extend(self, context: DraftContext, frontier: Frontier) -> Tensor:
        """Run the frontier's W last nodes after `read`; return log-probabilities `[B, W, V]` as `read` does."""
        new, tokens = frontier.real, frontier.tokens[:, 1:]
        rows, size = tokens.shape
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
        lengths, depths = context.lengths.to(new.device) + 1, frontier.depths[:, 1:] - 1
        ancestors, reach = frontier.ancestors[:, 1:, 1:], context.longest + 1 + size
        return self._log_probs(self._run(tokens, lengths, depths, ancestors, reach, packing)[:, size - width :])

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


class ModelDrafter(TextReader):
    """Best-first tree of a draft model's likeliest continuations, one forward per level.

    Only nodes among the best `nodes` so far are run: a path's probability falls along it, so no other can have a child
    in the tree.
    """

    def __init__(self, model: BaseModel, base: Target, nodes: int) -> None:
        depth, self._beam = min(nodes, _DEPTH), min(nodes, _WIDTH)
        super().__init__(model, base, nodes, depth, most_places(depth, self._beam) - 1)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Grow trees `[B, 1 + ask.nodes]`."""

        def conditionals(frontier: Frontier) -> tuple[Tensor, Tensor]:
            # `read` takes the pending token with the new ones.
            log_probs = self.extend(context, frontier) if frontier.first else self.read(context)
            best, tokens = log_probs.topk(min(ask.nodes, log_probs.shape[2]))
            return best, tokens

        pending = context.pending.to(self._model.device)
        depth, size = self.spec.max_depth, 1 + ask.nodes
        tree = best_first_trie(conditionals, pending, depth, size, self._beam, ask.least_probability)
        self._times.mark("draft")
        return TokenTree(*(part.to(context.tokens.device) for part in vars(tree).values()))


class StackedDrafter(MergedDrafter):
    """Lets a draft model rescore, prune and extend the trees of a lower drafter, which may be a stack itself.

    The lower drafter should have `LOWER_NODES` times as many nodes; the others are arguments of `TextReader`.

    Raises:
        LoadError: The lower drafter drafts in the target model's own KV cache.
    """

    def __init__(self, lower: Drafter, model: BaseModel, base: Target, nodes: int) -> None:
        if lower.spec.shared_layers:
            raise LoadError(
                "the target model's own layers cannot draft for a stack: its KV cache has no room for their trees"
            )
        depth = min(lower.spec.max_depth + 1, nodes)
        self.lower, self._device = lower, model.device
        self._reader = TextReader(model, base, nodes, depth, lower.spec.max_nodes)
        super().__init__(lower, self._reader)
        self.spec = replace(self.spec, max_nodes=nodes, max_depth=depth)

    def open(self, loan: Loan) -> None:
        self._times = loan.times
        super().open(loan)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Let the lower drafter propose, run the model over its nodes, and return the best `[B, 1 + ask.nodes]`."""
        wanted = min(LOWER_NODES * ask.nodes, self.lower.spec.max_nodes)
        drafted = self.lower.propose(context, Ask(wanted, ask.least_probability / LOWER_NODES))
        here = TokenTree(*(part.to(self._device) for part in vars(drafted).values()))
        tree = reprice(here, self._reader.read(context, here), _OWN_CHILDREN, self.spec.max_depth, ask.nodes + 1)
        self._times.mark("draft")
        return TokenTree(*(part.to(context.tokens.device) for part in vars(tree).values()))


def reprice(tree: TokenTree, log_probs: Tensor, own: int, depth: int, size: int) -> TokenTree:
    """Return the best trees by a model's probabilities, out of a tree's nodes and the model's own continuations.

    Args:
        tree: `[B, N]` drafted tree, root included.
        log_probs: `[B, N, V]` of the token after each node.
        own: Children per node that the model adds.
        depth: Deepest level of the result.
        size: Its nodes, root included.
    """
    count = tree.size
    place = tree.parents * log_probs.shape[2] + tree.tokens.clamp(0, log_probs.shape[2] - 1)
    conditional = log_probs.flatten(1).gather(1, place)
    conditional = torch.where(tree.tokens >= 0, conditional, -torch.inf)
    conditional[:, 0].zero_()
    # All paths are summed in the same order, so rounding never ranks a child above its parent.
    paths = torch.where(tree.ancestors(), conditional[:, None], 0.0).sum(2)
    best, tokens = log_probs.topk(min(own, log_probs.shape[2]))
    each = best.shape[2]
    is_child = (tree.parents[:, None, 1:] == torch.arange(count, device=tokens.device)[:, None]) & (
        tree.tokens[:, None, 1:] >= 0
    )
    known = ((tree.tokens[:, None, None, 1:] == tokens[..., None]) & is_child[:, :, None]).any(3)
    own_paths = torch.where(known, -torch.inf, paths[:, :, None] + best).flatten(1)
    own_parents = (torch.arange(count, device=tokens.device) - 1).repeat_interleave(each)
    candidates = torch.cat([paths[:, 1:], own_paths], 1)
    depths = torch.cat([tree.depths[:, 1:], (tree.depths + 1).repeat_interleave(each, 1)], 1)
    return from_nodes(
        tree.tokens[:, 0],
        torch.cat([tree.tokens[:, 1:], tokens.flatten(1)], 1),
        torch.cat([tree.parents[:, 1:] - 1, own_parents.expand(len(tokens), -1)], 1),
        depths,
        candidates.masked_fill(depths > depth, -torch.inf),
        size,
    )


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


def load_draft_model(name: str, base: Target) -> BaseModel:
    """Load `PATH_OR_HUB_ID` or `PATH_OR_HUB_ID@DEVICE`, in the target model's dtype if on its device, the default.

    Raises `LoadError` if it cannot be loaded, or has another tokeniser than the target model.
    """
    path, device = model_and_device(name)
    if not path:
        raise LoadError("drafter model: has no name: use model:PATH_OR_HUB_ID")
    different = difference(load_tokenizer(path), load_tokenizer(base.name))
    if different is not None:
        raise LoadError(
            f"draft model {path!r} has another tokenizer than {base.name}: {different}; use a model of the same family"
        )
    target = base.device if device is None else pick_device(device)
    return load_base(path, dtype=base.dtype if target == base.device else "auto", device=target)


def load_model_drafter(name: str, loading: Loading) -> Drafter:
    """Load `model:NAME`; raise `LoadError` if it cannot be used."""
    return ModelDrafter(load_draft_model(name, loading.base), loading.base, loading.nodes)


def load_stack(levels: str, loading: Loading) -> Drafter:
    """Load `stack:LEVELS`: `LOWER>model:A`, or more, lowest first; raise `LoadError` if a level cannot be used."""
    lower, *models = stack_levels(levels)
    kinds = [kind_and_rest(model) for model in models]
    one_each = all(kind == "model" and rest for kind, rest in kinds) and all(len(merged_names(m)) == 1 for m in models)
    if not lower or not models or not one_each:
        raise LoadError(f"no stack {levels!r}: use stack:LOWER>model:A, with one model in each level above the lowest")
    base = loading.base
    counts = [loading.nodes * LOWER_NODES ** (len(models) - place) for place in range(len(models) + 1)]
    drafter = replace(loading, nodes=counts[0]).load(lower)
    for (_, name), count in zip(kinds, counts[1:], strict=True):
        drafter = StackedDrafter(drafter, load_draft_model(name, base), base, count)
    return drafter
