"""`eagle3`: a decoder layer that drafts token by token (Li et al. 2025, arXiv 2503.01840).

A draft's own keys and values are discarded with it. Committed tokens get entries made of the target model's hidden
states, as published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from drafter.drafters.contract import Ask, DraftContext, DraftSpec
from drafter.heads.attention import rotation_table
from drafter.heads.context_reader import CacheShape, ContextReader, Entries
from drafter.heads.contract import DraftHead, Tree
from drafter.heads.frame_head import HeadDrafter
from drafter.heads.losses import DraftBatch, Labels, LossSum, cross_entropy
from drafter.methods.eagle3.config import Eagle3HeadConfig, fused_layers
from drafter.methods.eagle3.layers import DraftLayer, Fusion, KnownTexts, Projected, Rollout, sees_entries
from drafter.target.model import BaseModel
from drafter.target.prepacked import prepack
from drafter.tree.token_tree import Conditionals, Frontier, TokenTree, best_first_trie


class Eagle3Reader(ContextReader):
    """Reads each sequence's new tokens into the layer's KV cache, and starts drafts behind them.

    `fresh` is the number of tokens that an ordinary step adds to a sequence at most.
    """

    def __init__(
        self, config: Eagle3HeadConfig, fusion: Fusion, layer: DraftLayer, base: BaseModel, fresh: int
    ) -> None:
        # Nothing is written behind the pending token, but drafts have rotary positions there.
        super().__init__(base, fresh, CacheShape(1, config.kv_heads, config.head_width, behind=config.depth))
        self._config, self._fusion, self._layer = config, fusion, layer

    def rollout(self, context: DraftContext) -> Rollout:
        """Read the new entries; return drafts that start at the pending tokens, one per row."""
        rows = context.tokens.shape[0]
        entries, ends = self._recent(rows)
        new = self._read(context, entries)
        keys, values = self._texts(rows, context.longest + 1)[0]
        sees = sees_entries(self._place[: keys.shape[1]], context.lengths)
        return Rollout(self._layer, KnownTexts(keys, values, sees), new[ends])

    def rotation(self, positions: Tensor) -> Tensor:
        return self._rotation[positions]

    def _rotation_table(self, length: int) -> Tensor:
        return rotation_table(self._config.rotary_rates(self._base.device), length, self._base.dtype)

    def _remember(self, context: DraftContext, entries: Entries) -> None:
        self._read(context, entries)

    def _read(self, context: DraftContext, entries: Entries) -> Projected:
        positions, embeddings, hidden = self._inputs(context, entries)
        new = self._layer.project(embeddings, self._fusion(hidden), self._rotation[positions])
        self._store(positions + entries.slots * self._length, 0, new.keys[None], new.values[None])
        return new


_BEAM = 10
"""Nodes run per level, as published."""

Rotation = Callable[[Tensor], Tensor]
"""Positions `[...]` → cosine and signed sine `[..., 2, D]`."""


class Eagle3Head(DraftHead):
    """A decoder layer, a fusion of the target model's hidden states, and an output layer."""

    algorithm = "eagle3"
    config_class = Eagle3HeadConfig
    config: Eagle3HeadConfig

    def __init__(self, config: Eagle3HeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.hidden_layers = config.hidden_layers
        self.fusion = Fusion(config)
        self.layer = DraftLayer(config)
        self.norm = nn.RMSNorm(width, config.norm_eps)
        self._ids = config.draft_vocab_size or config.vocab_size
        self.output_layer = nn.Linear(width, self._ids, bias=False)

    @classmethod
    def defaults(cls, layers: int) -> dict[str, Any]:
        return {"hidden_layers": fused_layers(layers)}

    def start_from(self, base: BaseModel) -> None:
        """Initialise the output layer with the target model's LM head."""
        with torch.no_grad():
            self.output_layer.weight.copy_(self.output(base).lm_head_weight)

    def carried(self, states: Tensor) -> Tensor:
        """Return the next step's input from the layer's outputs, both `[..., d]`."""
        return self.norm(states) if self.config.norm_output else states

    def log_probs(self, states: Tensor) -> Tensor:
        """Return float32 log-probabilities `[..., V]` of draft ids at the layer's outputs `[..., d]`."""
        return self.output_layer(self.norm(states)).float().log_softmax(-1)  # type: ignore[no-any-return]

    def forward(self, base: BaseModel, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        """Return the depth-weighted cross-entropy of steps along the text; see `DraftHead.forward`."""
        told = self.draft_targets(batch, labels)
        real = told.lengths > 0
        labels = told.labels[real]
        log_probs = self.log_probs(self.unrolled(base, batch, hidden)[real]).gather(2, labels.tokens)
        return cross_entropy(log_probs, labels, told.lengths[real], self.config.depth_decay)

    def unrolled(self, base: BaseModel, batch: DraftBatch, hidden: Tensor) -> Tensor:
        """Return the layer's outputs `[B, A, U, d]` of steps along the text; see `DraftHead.forward`."""
        rollout, rotation = self._rollout(base, batch.tokens, hidden, batch.anchors)
        tokens, positions = batch.targets.flatten(0, 1), batch.anchors.flatten()[:, None]
        states = [rollout.start()]
        for step in range(1, self.config.depth):
            sees = torch.ones(len(tokens), 1, step, dtype=torch.bool, device=tokens.device)
            embeddings = base.embed(tokens[:, step - 1 : step])
            states.append(rollout.grow(embeddings, self.carried(states[-1]), rotation(positions + step), sees))
        return torch.cat(states, 1).view(*batch.anchors.shape, self.config.depth, -1)

    def trees_at(
        self, base: BaseModel, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int, tree: Tree = "exact"
    ) -> TokenTree:
        _refuse_tree(tree)
        rollout, rotation = self._rollout(base, tokens, hidden, anchors)
        pending = tokens.gather(1, anchors).flatten()
        return self.best_tree(base, rollout, rotation, pending, anchors.flatten(), Ask(size - 1))

    def drafter(self, base: BaseModel, nodes: int, tree: Tree = "exact") -> Eagle3Drafter:
        _refuse_tree(tree)
        prepack(self)
        return Eagle3Drafter(self, base, nodes)

    def best_tree(
        self, base: BaseModel, rollout: Rollout, rotation: Rotation, pending: Tensor, positions: Tensor, ask: Ask
    ) -> TokenTree:
        """Return trees `[R, 1 + ask.nodes]` of R new drafts, from `pending` tokens `[R]` at `positions` `[R]`."""
        grow = self._conditionals(base, rollout, rotation, positions, ask.nodes)
        tree = best_first_trie(grow, pending, self.config.depth, ask.nodes + 1, _BEAM, ask.least_probability)
        return self.name_nodes(tree)

    def _conditionals(
        self, base: BaseModel, rollout: Rollout, rotation: Rotation, positions: Tensor, children: int
    ) -> Conditionals:
        outputs: list[Tensor] = []
        children = min(children, self._ids)

        def grow(frontier: Frontier) -> tuple[Tensor, Tensor]:
            if not outputs:
                outputs.append(rollout.start())
            else:
                depths, sees = frontier.depths[:, frontier.first :], frontier.ancestors[:, frontier.first :]
                parents = (sees & (frontier.depths[:, None] == depths[:, :, None] - 1)).int().argmax(2)
                before = self.carried(torch.cat(outputs, 1))
                hidden = before.gather(1, parents[:, :, None].expand(-1, -1, before.shape[2]))
                # Missing nodes have the root's token, which need not be a draft id.
                ids = frontier.tokens[:, frontier.first :].clamp_max(self._ids - 1)
                turned = rotation(positions[:, None] + depths)
                outputs.append(rollout.grow(base.embed(self.base_tokens(ids)), hidden, turned, sees[:, :, 1:]))
            found = self.log_probs(outputs[-1]).topk(children)
            return found.values, found.indices

        return grow

    def _rollout(self, base: BaseModel, tokens: Tensor, hidden: Tensor, anchors: Tensor) -> tuple[Rollout, Rotation]:
        """Return drafts at `anchors` `[B, A]` of texts `[B, L]`, text by text, and their rotation."""
        length = tokens.shape[1]
        table = rotation_table(self.config.rotary_rates(hidden.device), length + self.config.depth, hidden.dtype)
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        entries = self.layer.project(base.embed(tokens), self.fusion(before), table[:length])
        row = torch.arange(len(tokens), device=tokens.device).repeat_interleave(anchors.shape[1])
        sees = sees_entries(torch.arange(length, device=tokens.device), anchors.flatten())
        texts = KnownTexts(entries.keys, entries.values, sees)
        return Rollout(self.layer, texts, entries[row, anchors.flatten()]), lambda positions: table[positions]


class Eagle3Drafter(HeadDrafter):
    def __init__(self, head: Eagle3Head, base: BaseModel, nodes: int) -> None:
        spec = DraftSpec(nodes, min(nodes, head.config.depth), hidden_layers=head.hidden_layers)
        self._reader = Eagle3Reader(head.config, head.fusion, head.layer, base, spec.max_depth + 1)
        super().__init__(spec, self._reader)
        self._head, self._base = head, base

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Read the new tokens, and grow the best trees `[B, 1 + ask.nodes]`."""
        rollout = self._reader.rollout(context)
        self._times.mark("draft")
        return self._head.best_tree(self._base, rollout, self._reader.rotation, context.pending, context.lengths, ask)


def _refuse_tree(tree: Tree) -> None:
    if tree == "static":
        raise ValueError("the static tree needs heads that do not depend on the path: EAGLE-3's layer does")
