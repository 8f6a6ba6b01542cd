"""Draft trees from smaller models with the target's tokeniser: one (SpecInfer, arXiv 2305.09781), or a stack of them.

In a stack (hierarchical speculative decoding, HSD, arXiv 2510.19705) each model scores the tree of the drafter below in
one forward, adds its own best continuations, and passes on the best nodes of all. The target model verifies the last.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafter.drafters.contract import Ask, DraftContext, Drafter, Loading, Loan
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.model_drafter import ModelDrafter, TextReader
from drafter.drafters.names import kind_and_rest, merged_names
from drafter.drafters.target import Target
from drafter.errors import LoadError
from drafter.methods.draft_models import model_and_device, stack_levels
from drafter.target_model.loading import load_base, pick_device
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from drafter.tree.token_tree import TokenTree, from_nodes

LOWER_NODES = 2
"""Nodes asked of the lower drafter for each one passed on."""
_OWN_CHILDREN = 4  # continuations that the model adds to each node


class StackedDrafter(MergedDrafter):
    """Lets a draft model rescore, prune and extend the trees of a lower drafter, which may be a stack itself.

    The lower drafter should have `LOWER_NODES` times as many nodes; the others are arguments of `TextReader`.
    """

    def __init__(self, lower: Drafter, model: BaseModel, base: Target, nodes: int) -> None:
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
