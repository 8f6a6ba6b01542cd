"""`exit:N`: the target model's first N layers are the draft model (self-speculation; FastVLM, arXiv 2510.22641).

The state behind layer N goes through the final norm and LM head, optionally through a trained imitation network
(`ExitHead`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.drafters.contract import Ask, DraftContext, Drafter, Loading, Loan
from drafter.drafters.model_drafter import DEPTH, ModelDrafter
from drafter.drafters.slots import NO_TEXT
from drafter.errors import LoadError
from drafter.heads.config import Tree, check_sizes
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch, Labels, LossSum, chosen_log_probs, likeliest_logits
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import TreeNodes
from drafter.target_model.prepacked import prepack
from drafter.tree.token_tree import TokenTree

BEAM = 8
"""Nodes run per level."""
_TAUGHT = 32
"""Likeliest tokens of the target model whose probabilities are distilled."""
_AT_ONCE = 16
"""Positions of a text whose trees grow together."""


class ExitDrafter(ModelDrafter):
    """Drafts with the first `layers` of the target model; raises `LoadError` if it does not have so many.

    `network` maps states behind the final norm `[..., d]` to the LM head's input; None is the identity. It must not
    change afterwards.
    """

    def __init__(
        self, base: BaseModel, layers: int, nodes: int, depth: int = DEPTH, network: nn.Module | None = None
    ) -> None:
        if not 1 <= layers <= base.num_layers:
            raise LoadError(f"{base.name} has {base.num_layers} layers, so {layers} of them cannot draft: give fewer")
        super().__init__(base, base, nodes, depth, BEAM, layers)
        self._network = network

    def _logits(self, nodes: TreeNodes) -> Tensor:
        if self._network is None:
            return super()._logits(nodes)
        states = self._model.forward(self.cache, replace(nodes, logits=False))[1]
        packing = nodes.packing
        if packing is None:
            return self._model.lm_head(self._network(states))
        return packing.unpack(self._model.lm_head(self._network(packing.pack(states))))


def named_exit(rest: str, loading: Loading) -> Drafter:
    """Return the drafter `exit:rest`; raise `LoadError` if `rest` is no number of layers of the target model."""
    base = loading.base
    assert isinstance(base, BaseModel), "an exit runs layers of the target model itself"
    if not (rest.isascii() and rest.isdigit() and 1 <= int(rest) <= base.num_layers):
        raise LoadError(
            f"drafter 'exit:{rest}': after the colon comes how many of the first layers of {base.name} draft, "
            f"from 1 to {base.num_layers}"
        )
    return ExitDrafter(base, int(rest), loading.nodes)


@dataclass(frozen=True)
class ExitHeadConfig:
    """Shape of an exit and of its imitation network.

    Args:
        hidden_size: d, width of the target model's hidden states.
        vocab_size: V, size of the target model's vocabulary.
        layers: N, how many of the target model's first layers draft.
        depth: U, draft tokens of a path at most.
        inner_size: Width of the network's hidden layer.
        rejected_weight: Loss weight of a position where the exit would currently draft another token than the target
            model chooses; other positions have the weight 1. So rejected tokens are learned first.
    """

    hidden_size: int
    vocab_size: int
    layers: int
    depth: int = DEPTH
    inner_size: int = 1024
    rejected_weight: float = 3.0

    def __post_init__(self) -> None:
        check_sizes(self, "hidden_size", "vocab_size", "layers", "depth", "inner_size")
        if not self.rejected_weight >= 0:
            raise ValueError(f"rejected_weight must be at least 0, not {self.rejected_weight}")


class ImitationNetwork(nn.Module):
    """`h + W_down (SiLU(W_gate h) · W_up h)`. `W_down` starts at zero."""

    def __init__(self, width: int, inner_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner_size, bias=False)
        self.up = nn.Linear(width, inner_size, bias=False)
        self.down = nn.Linear(inner_size, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, states: Tensor) -> Tensor:
        """Map exit states `[..., d]` to imitations of last states, in their dtype."""
        read = states.to(self.gate.weight.dtype)
        return states + self.down(F.silu(self.gate(read)) * self.up(read)).to(states.dtype)  # type: ignore[no-any-return]


class ExitHead(DraftHead):
    """`exit`: early exit with a trained imitation network.

    A small network makes the state behind the first N layers and the final norm resemble the last state, which the LM
    head reads. It works position by position, without a cache. The paper does not specify it; here it is a gated MLP on
    a residual path that starts as zero, so an untrained head drafts as `exit:N` does.
    """

    algorithm = "exit"
    config_class = ExitHeadConfig
    config: ExitHeadConfig
    no_static_tree = "an exit head grows its trees node by node: it has the exact tree only"

    def __init__(self, config: ExitHeadConfig) -> None:
        super().__init__(config)
        self.network = ImitationNetwork(config.hidden_size, config.inner_size)

    @property
    def deepest_layer(self) -> int:
        return self.config.layers - 1

    def start_from(self, base: BaseModel) -> None:  # type: ignore[override]
        """Check that the target model has enough layers; raise `LoadError` if not."""
        if self.config.layers > base.num_layers:
            raise LoadError(
                f"draft head 'exit': {base.name} has {base.num_layers} layers, so layers cannot be {self.config.layers}"
            )

    def forward(self, base: BaseModel, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:  # type: ignore[override]
        """Return the loss of the anchors, each of which is a position whose next token is to be drafted.

        Per position: one minus the cosine between the imitation and the last state, plus the cross-entropy against the
        target model's distribution over its likeliest tokens (distillation), plus the cross-entropy of the label.
        States are those of the text, which equal the draft path's where that is right.
        """
        real, config = batch.lengths > 0, self.config
        index = batch.anchors[:, :, None].expand(-1, -1, config.hidden_size)
        states = self.network(base.read_early(batch.tokens, config.layers).gather(1, index)[real])
        last = hidden.gather(1, index)[real]
        taught_logits, taught = likeliest_logits(base, last, min(_TAUGHT, config.vocab_size))
        tokens = torch.cat([taught, labels.tokens[real][:, 0]], 1)
        probs = torch.cat([taught_logits.softmax(1), labels.probs[real][:, 0]], 1)
        loss = 1.0 - F.cosine_similarity(states.float(), last.float(), dim=1)
        loss = loss - (probs * chosen_log_probs(base, states, tokens)).sum(1)
        rejected = likeliest_logits(base, states.detach(), 1)[1] != taught[:, :1]
        weights = torch.where(rejected[:, 0], config.rejected_weight, 1.0)
        return LossSum((weights * loss).sum(), weights.sum())

    def drafter(self, base: BaseModel, nodes: int, tree: Tree = "exact") -> ExitDrafter:  # type: ignore[override]
        self.refuse_tree(tree)
        prepack(self.network)
        return ExitDrafter(base, self.config.layers, nodes, self.config.depth, self.network)

    @torch.no_grad()
    def trees_at(  # type: ignore[override]
        self, base: BaseModel, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int, tree: Tree = "exact"
    ) -> TokenTree:
        """See `DraftHead.trees_at`. `hidden` is not read."""
        self.refuse_tree(tree)
        drafter = ExitDrafter(base, self.config.layers, size - 1, self.config.depth, self.network)
        rows, length = min(_AT_ONCE, anchors.shape[1]), tokens.shape[1]
        drafter.open(Loan(base, rows, length, StageTimes()))
        (entries,), found = drafter.slots, []
        for text, places in zip(tokens, anchors.tolist(), strict=True):

            def context(lengths: list[int], text: Tensor = text) -> DraftContext:
                return DraftContext(text.expand(len(lengths), -1), None, tokens.new_tensor(lengths), lengths)

            for row in range(rows):
                entries.enter(row, NO_TEXT)
            drafter.prepare(context([length - 1]))
            for row in range(1, rows):
                entries.copy(0, row, length - 1)
            # Last position first: a tree overwrites the text behind its root, which no later tree reads.
            order = sorted(range(len(places)), key=lambda place: -places[place])
            trees = []
            for start in range(0, len(order), rows):
                some = context([places[place] for place in order[start : start + rows]])
                drafter.prepare(some)
                trees.append(drafter.propose(some, Ask(size - 1)))
            back = tokens.new_tensor(order).argsort()
            found.append([torch.cat(parts)[back] for parts in zip(*(vars(one).values() for one in trees), strict=True)])
        return TokenTree(*(torch.cat(parts) for parts in zip(*found, strict=True)))
