"""`exit:N`: the target model's first N layers draft on its own KV cache (self-speculation; FastVLM, arXiv 2510.22641).

The state behind layer N goes through the final norm and LM head, optionally through a trained imitation network
(`ExitHead`). Keys and values of draft tokens go behind the committed ones, where verification overwrites them. Nothing
is copied or kept between steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter import devices
from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Loading, Loan
from drafter.errors import LoadError
from drafter.target.attention import Packing
from drafter.target.forward import TreeNodes
from drafter.target.model import BaseModel
from drafter.tree.token_tree import Frontier, TokenTree, best_first_trie, most_places

DEPTH = 8
"""Deepest level; each costs a forward of the first layers."""
BEAM = 8
"""Nodes run per level."""


class ExitDrafter(Drafter):
    """Drafts with the first layers of the target model.

    Args:
        base: The target model.
        layers: N, layers that draft.
        nodes: Draft nodes of the largest tree.
        depth: Deepest level of a tree.
        network: Maps states behind the final norm `[..., d]` to the LM head's input; None is the identity. It must not
            change afterwards.

    Raises:
        LoadError: The target model does not have so many layers.
    """

    def __init__(
        self, base: BaseModel, layers: int, nodes: int, depth: int = DEPTH, network: nn.Module | None = None
    ) -> None:
        if not 1 <= layers <= base.num_layers:
            raise LoadError(f"{base.name} has {base.num_layers} layers, so {layers} of them cannot draft: give fewer")
        depth = min(depth, nodes)
        self._beam = min(BEAM, nodes)
        self.spec = DraftSpec(nodes, depth, shared_layers=layers, scratch=most_places(depth, self._beam))
        self._network = network

    def open(self, loan: Loan) -> None:
        self._loan = loan

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Grow trees `[B, 1 + ask.nodes]`."""
        growth = _Growth(self._loan, self.spec.shared_layers, self._network, context, ask.nodes)
        tree = best_first_trie(
            growth, context.pending, self.spec.max_depth, ask.nodes + 1, self._beam, ask.least_probability
        )
        growth.leave_nothing_infinite()
        return tree


class _Growth:
    """Conditionals of one step's trees, K = `children` tokens per node; see `search.Conditionals`."""

    def __init__(
        self, loan: Loan, layers: int, network: nn.Module | None, context: DraftContext, children: int
    ) -> None:
        assert loan.cache is not None
        self._base, self._cache, self._times = loan.base, loan.cache, loan.times
        self._layers, self._network = layers, network
        self._context, self._children = context, min(children, self._base.vocab_size)
        self._waits = devices.is_asynchronous(self._base.device)
        self._sound = torch.ones_like(context.lengths, dtype=torch.bool)
        self._places = 0

    def __call__(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        self._places = frontier.tokens.shape[1]
        # Padding is left out where no device sync is needed for it.
        packing = Packing.of(frontier.real) if not self._waits and len(frontier.tokens) > 1 else None
        # GPU kernels need masks in multiples of eight, like the cache.
        kv_length = min(-(-(self._context.longest + self._places) // 8) * 8, self._cache.length)
        nodes = TreeNodes(
            frontier.tokens, self._context.lengths, frontier.depths, frontier.ancestors, kv_length, packing
        )
        states = self._base.exit_early(self._cache, nodes, self._layers, frontier.first)
        if packing is not None:
            states = packing.pack(states)
        if self._network is not None:
            states = self._network(states)
        self._times.mark("draft")
        logits = self._base.lm_head(states).float()
        best, tokens = logits.topk(self._children)
        whole = logits.logsumexp(-1, keepdim=True)
        log_probs = best - whole
        if packing is not None:
            log_probs, tokens, whole = (packing.unpack(part) for part in (log_probs, tokens, whole))
        self._sound &= (whole[..., 0].isfinite() | ~frontier.real).all(1)
        self._times.mark("tree")
        return log_probs, tokens

    def leave_nothing_infinite(self) -> None:
        """Zero keys and values of nodes that were not finite: masked positions are read, too."""
        if self._waits or not bool(self._sound.all()):
            rows = slice(0, len(self._sound))
            self._cache.scrub(self._context.lengths, self._places, ~self._sound, rows)


def named_exit(rest: str, loading: Loading) -> Drafter:
    """Return the drafter `exit:rest`.

    Raises:
        LoadError: `rest` is no number of layers that the target model has.
    """
    base = loading.base
    if not (rest.isascii() and rest.isdigit() and 1 <= int(rest) <= base.num_layers):
        raise LoadError(
            f"drafter 'exit:{rest}': after the colon comes how many of the first layers of {base.name} draft, "
            f"from 1 to {base.num_layers}"
        )
    return ExitDrafter(base, int(rest), loading.nodes)
