"""`imitation`: early exit with a trained imitation network (FastVLM, arXiv 2510.22641).

A small network makes the output of the first N layers resemble the last state, which the frozen LM head reads. It works
position by position, so that drafting reads nothing but the target model's own keys and values. The paper does not
specify the network; here it is a norm, which starts as the final one, and a gated MLP on a residual path that starts as
zero, so that an untrained head drafts as `exit:N` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.drafters.contract import Ask, DraftContext, Loan
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.heads.config import Tree, check_sizes
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch, Labels, LossSum, chosen_log_probs, likeliest_logits
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.target_model.prepacked import prepack
from drafter.training.targets import base_hidden_states
from drafter.tree.token_tree import TokenTree

_EPSILON = 1e-6
_TAUGHT = 32  # likeliest tokens of the target model whose probabilities are distilled
_NORM_TOKENS = 64  # tokens of the text from which the final norm is known
_AT_ONCE = 16  # positions of a text whose trees grow together


@dataclass(frozen=True)
class ImitationConfig:
    """Shape and loss of an imitation network.

    Args:
        hidden_size: d, width of the target model's hidden states.
        vocab_size: V, size of the target model's vocabulary.
        layers: N, how many of the target model's first layers draft.
        depth: U, draft tokens of a path at most.
        inner_size: Width of the network's hidden layer.
        draft_vocab_size: Number of tokens that may be drafted, the most frequent ones; None for all.
        cosine_weight: Loss weight of one minus the cosine between the imitation and the last state.
        distillation_weight: Loss weight of the cross-entropy against the target model's distribution.
        label_weight: Loss weight of the cross-entropy against the label.
        rejected_weight: Loss weight of a position where the network would currently draft another token than the
            target model chooses; other positions have the weight 1. So rejected tokens are learned first.
    """

    hidden_size: int
    vocab_size: int
    layers: int
    depth: int = 4
    inner_size: int = 1024
    draft_vocab_size: int | None = None
    cosine_weight: float = 1.0
    distillation_weight: float = 1.0
    label_weight: float = 1.0
    rejected_weight: float = 3.0

    def __post_init__(self) -> None:
        check_sizes(self, "hidden_size", "vocab_size", "layers", "depth", "inner_size")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size must be from 1 to {self.vocab_size}, not {self.draft_vocab_size}")
        weights = ("cosine_weight", "distillation_weight", "label_weight")
        for name in (*weights, "rejected_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be at least 0 and finite, not {getattr(self, name)}")
        if not any(getattr(self, name) for name in weights):
            raise ValueError(f"one of {', '.join(weights)} must be more than 0, or nothing is learned")


class ImitationNetwork(nn.Module):
    """`n + W_down (SiLU(W_gate n) · W_up n)` of a normed state `n`. `W_down` starts at zero."""

    def __init__(self, width: int, inner_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, _EPSILON)
        self.gate = nn.Linear(width, inner_size, bias=False)
        self.up = nn.Linear(width, inner_size, bias=False)
        self.down = nn.Linear(inner_size, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, states: Tensor) -> Tensor:
        """Map layers' outputs `[..., d]` to imitations of last states, in their dtype."""
        normed = self.norm(states.to(self.norm.weight.dtype))
        return (normed + self.down(F.silu(self.gate(normed)) * self.up(normed))).to(states.dtype)  # type: ignore[no-any-return]

    @torch.no_grad()
    def start_from(self, outputs: Tensor, last: Tensor) -> None:
        """Make the norm the one between the last layer's `outputs` `[M, d]` and the `last` states `[M, d]`.

        Each channel's weight follows from the row where it is largest: exact for an RMS norm, a start for others.
        """
        normed = F.rms_norm(outputs.float(), outputs.shape[1:], eps=_EPSILON)
        row = normed.abs().argmax(0, keepdim=True)
        self.norm.weight.copy_((last.float().gather(0, row) / normed.gather(0, row))[0])


class ImitationHead(DraftHead):
    """The network and its training."""

    algorithm = "imitation"
    config_class = ImitationConfig
    config: ImitationConfig
    reads_texts = True
    no_static_tree = "an imitation network grows its trees node by node: it has the exact tree only"

    def __init__(self, config: ImitationConfig) -> None:
        super().__init__(config)
        self.network = ImitationNetwork(config.hidden_size, config.inner_size)
        self.hidden_layers = (config.layers - 1, LM_HEAD_INPUT)

    @classmethod
    def defaults(cls, layers: int) -> Mapping[str, Any]:
        return {"layers": max(1, layers // 10)}

    def start_from(self, base: BaseModel) -> None:  # type: ignore[override]
        """Take over the final norm."""
        count = min(_NORM_TOKENS, base.max_positions or _NORM_TOKENS)
        tokens = torch.linspace(0, base.vocab_size - 1, count, device=base.device).long()[None]
        hidden = base_hidden_states(base, tokens, (base.num_layers - 1, LM_HEAD_INPUT))
        self.network.start_from(*hidden[0].chunk(2, -1))

    def forward(self, base: BaseModel, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:  # type: ignore[override]
        """Return the loss of the anchors, each of which is a position whose next token is to be drafted.

        States are those of the text, which equal the draft path's where that is right. Where a draft vocabulary lacks
        the label, the other two parts remain.
        """
        real, config, output = batch.lengths > 0, self.config, self.output(base)
        at_anchors = hidden.gather(1, batch.anchors[:, :, None].expand(-1, -1, hidden.shape[2]))[real]
        outputs, last = at_anchors.chunk(2, -1)
        states = self.network(outputs)
        labels = self.in_draft_ids(batch, labels)[1]
        count = min(_TAUGHT, config.draft_vocab_size or config.vocab_size)
        taught_logits, taught = likeliest_logits(output, last, count)
        tokens = torch.cat([taught, labels.tokens[real][:, 0]], 1)
        shares = (config.distillation_weight * taught_logits.softmax(1), config.label_weight * labels.probs[real][:, 0])
        loss = config.cosine_weight * (1.0 - F.cosine_similarity(states.float(), last.float(), dim=1))
        loss = loss - (torch.cat(shares, 1) * chosen_log_probs(output, states, tokens)).sum(1)
        rejected = likeliest_logits(output, states.detach(), 1)[1] != taught[:, :1]
        weights = torch.where(rejected[:, 0], config.rejected_weight, 1.0)
        return LossSum((weights * loss).sum(), weights.sum())

    def drafter(self, base: BaseModel, nodes: int, tree: Tree = "exact") -> FirstLayersDrafter:  # type: ignore[override]
        self.refuse_tree(tree)
        prepack(self)
        return self._drafter(base, nodes)

    def _drafter(self, base: BaseModel, nodes: int) -> FirstLayersDrafter:
        output, tokens = self.output(base), None if self.vocabulary is None else self.vocabulary.tokens

        def logits(states: Tensor) -> Tensor:
            return output.lm_head(self.network(states))

        return FirstLayersDrafter(base, self.config.layers, nodes, self.config.depth, logits, tokens)

    @torch.no_grad()
    def trees_at(  # type: ignore[override]
        self, base: BaseModel, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int, tree: Tree = "exact"
    ) -> TokenTree:
        """See `DraftHead.trees_at`. `hidden` is not read."""
        self.refuse_tree(tree)
        drafter = self._drafter(base, size - 1)
        rows, length = min(_AT_ONCE, anchors.shape[1]), tokens.shape[1]
        cache = base.new_cache(rows, length + drafter.spec.run + 1, layers=self.config.layers)
        drafter.open(Loan(base, rows, length, StageTimes(), cache))
        found = []
        for text, places in zip(tokens, anchors.tolist(), strict=True):
            base.prefill(cache, 0, [text])
            for row in range(1, rows):
                cache.copy(0, row, length)
            # Last position first: a tree overwrites the text behind its root, which no later tree reads.
            order = sorted(range(len(places)), key=lambda place: -places[place])
            trees = []
            for start in range(0, len(order), rows):
                lengths = [places[place] for place in order[start : start + rows]]
                context = DraftContext(text.expand(len(lengths), -1), None, tokens.new_tensor(lengths), lengths)
                trees.append(drafter.propose(context, Ask(size - 1)))
            back = tokens.new_tensor(order).argsort()
            found.append([torch.cat(parts)[back] for parts in zip(*(vars(one).values() for one in trees), strict=True)])
        return TokenTree(*(torch.cat(parts) for parts in zip(*found, strict=True)))
