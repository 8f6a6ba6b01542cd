"""`specformer`: a chain of draft tokens in one forward (Shi et al. 2025, arXiv 2511.20340).

The token's embedding and the hidden states before it are normed and fused. One attention layer reads the text, a linear
map yields a state per draft position, and these attend to one another. The published module fuses the embedding of the
token before the pending one; here it is the pending token's, known when drafting begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.drafters.contract import DraftContext
from drafter.drafters.target import Target
from drafter.heads.config import HeadConfig, Tree, check_even_heads, check_sizes
from drafter.heads.contract import check_hidden_layers
from drafter.heads.frame_head import (
    ContextReader,
    DraftModule,
    FrameHead,
    FrameReader,
    all_hidden_before,
    rotary_rates,
    rotate,
    rotation_table,
)
from drafter.heads.losses import DraftBatch, Labels, LossSum, chosen_log_probs, cross_entropy
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.target_model.prepacked import prepack
from drafter.tree.token_tree import TokenTree, likeliest_chain


@dataclass(frozen=True)
class SpecFormerHeadConfig(HeadConfig):
    """Shape of a SpecFormer head, with `depth` draft positions.

    Args:
        hidden_layers: Hidden states that are fused beside the token's embedding; see `DraftSpec.hidden_layers`.
        num_heads: Attention heads; each has an even width.
        intermediate_size: Inner width of the gated MLP.
        rope_theta: Base of the rotary positions.
    """

    hidden_layers: tuple[int, ...]
    depth: int = field(default=8, kw_only=True)
    num_heads: int = 4
    intermediate_size: int = 704
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "num_heads", "intermediate_size", "rope_theta")
        check_hidden_layers(self.hidden_layers)
        check_even_heads(self)


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.RMSNorm(width, 1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def project(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[..., H, D]` of states `[..., d]`."""
        return self.qkv(self.norm(states)).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)  # type: ignore[no-any-return]

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from queries `[B, Q, H, D]` to `[B, S, H, D]` under a bool mask `[B, Q, S]`; return `[B, Q, d]`."""
        mask = None if mask is None else mask[:, None]
        queries, keys, values = (part.transpose(1, 2) for part in (queries, keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SpecFormerModule(DraftModule):
    """Computes the states of T = `num_frames` draft positions in one forward from K hidden states."""

    def __init__(self, config: SpecFormerHeadConfig) -> None:
        super().__init__()
        width, count = config.hidden_size, len(config.hidden_layers)
        self._config, self.num_frames = config, config.depth
        self.input_norms = nn.ModuleList(nn.RMSNorm(width, 1e-6) for _ in range(1 + count))
        self.fusion = nn.Linear((1 + count) * width, width, bias=False)
        self.text_attention = Attention(width, config.num_heads)
        self.position_norm = nn.RMSNorm(width, 1e-6)
        # Its bias encodes the draft position.
        self.positions = nn.Linear(width, self.num_frames * width)
        self.draft_attention = Attention(width, config.num_heads)
        self.mlp_norm = nn.RMSNorm(width, 1e-6)
        self.gate_up = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, width, bias=False)

    def fuse(self, embeddings: Tensor, hidden_before: Tensor) -> Tensor:
        """Return fused entries `[..., d]` of embeddings `[..., d]` and hidden states before them `[..., K · d]`."""
        parts = (embeddings, *hidden_before.chunk(len(self.input_norms) - 1, -1))
        normed = [norm(part) for norm, part in zip(self.input_norms, parts, strict=True)]
        return self.fusion(torch.cat(normed, -1))  # type: ignore[no-any-return]

    def rates(self, device: torch.device) -> Tensor:
        return rotary_rates(self._config.rope_theta, self._config.hidden_size // self._config.num_heads, device)

    def project(self, entries: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[..., H, D]` of entries `[..., d]`, at the positions of `[..., 2, D]`."""
        queries, keys, values = self.text_attention.project(entries)
        cos, sin = rotation[..., None, :, :].unbind(-2)
        return rotate(queries, cos, sin), rotate(keys, cos, sin), values

    def frames(self, pending: Tensor, read: Tensor, count: int | None) -> Tensor:
        """Return the first F = `count` draft positions, or all, `[N, F, d]`; each attends to all T.

        `pending` `[N, d]` are the pending tokens' entries, and `read` `[N, d]` their attention output over the text.
        """
        states = self.positions(self.position_norm(pending + read)).unflatten(-1, (self.num_frames, -1))
        queries, keys, values = self.draft_attention.project(states)
        states = states[:, :count] + self.draft_attention.mix(queries[:, :count], keys, values)
        gate, up = self.gate_up(self.mlp_norm(states)).chunk(2, -1)
        return states + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        place = torch.arange(embeddings.shape[1], device=anchors.device)
        entries = self.fuse(embeddings, all_hidden_before(hidden))
        rotation = rotation_table(self.rates(hidden.device), len(place), entries.dtype)
        queries, keys, values = self.project(entries, rotation)
        row = torch.arange(len(anchors), device=anchors.device)[:, None]
        read = self.text_attention.mix(queries[row, anchors], keys, values, place <= anchors[:, :, None])
        frames = self.frames(entries[row, anchors].flatten(0, 1), read.flatten(0, 1), count)
        return frames.view(*anchors.shape, *frames.shape[1:])

    def reader(self, base: Target, fresh: int) -> FrameReader:
        prepack(self)
        return _SpecFormerReader(self, base, fresh)


class _SpecFormerReader(ContextReader, FrameReader):
    def __init__(self, module: SpecFormerModule, base: Target, fresh: int) -> None:
        super().__init__(base, fresh, module.rates(base.device), layers=1, heads=module.text_attention.num_heads)
        self._module = module

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        rows = context.tokens.shape[0]
        slots, back, ends = self._recent(rows)
        fused, queries = self._read(context, slots, back)
        keys, values = self._texts(rows, context.longest + 1)[0]
        seen = (self._place[: keys.shape[1]] <= context.lengths[:, None])[:, None]
        read = self._module.text_attention.mix(queries[ends][:, None], keys, values, seen)
        return self._module.frames(fused[ends], read[:, 0], count)

    def _read(self, context: DraftContext, slots: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """Cache the keys and values of entries; return the entries `[E, d]` and their queries `[E, H, D]`."""
        positions, embeddings, hidden = self._inputs(context, slots, back)
        fused = self._module.fuse(embeddings, hidden)
        queries, keys, values = self._module.project(fused, self._rotation[positions])
        self._store(positions + slots * self._length, 0, keys[None], values[None])
        return fused, queries


class SpecFormerHead(FrameHead):
    """Predicts each position independently, and drafts the likeliest token of each."""

    algorithm = "specformer"
    config_class = SpecFormerHeadConfig
    config: SpecFormerHeadConfig
    no_static_tree = "the static tree needs alternatives at each depth: SpecFormer drafts a chain"

    def __init__(self, config: SpecFormerHeadConfig) -> None:
        super().__init__(config)
        self.hidden_layers = config.hidden_layers
        self.module = SpecFormerModule(config)
        self.norm = nn.RMSNorm(config.hidden_size, 1e-6)

    @classmethod
    def defaults(cls, layers: int) -> dict[str, Any]:
        """Return the published layers: the middle one, the last but one, and the LM head's input."""
        return {"hidden_layers": tuple(dict.fromkeys((max(0, layers // 2 - 1), max(0, layers - 2), LM_HEAD_INPUT)))}

    def forward(self, base: Target, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        real = batch.lengths > 0
        states = self.norm(self.module(base.embed(batch.tokens), hidden, batch.anchors)[real])
        labels = self.in_draft_ids(batch, labels)[1][real]
        log_probs = chosen_log_probs(self.output(base), states, labels.tokens)
        return cross_entropy(log_probs, labels, batch.lengths[real], self.config.depth_decay)

    def search(
        self, states: Tensor, recent: Tensor, base: Target, size: int, tree: Tree, least: float = 0.0
    ) -> TokenTree:
        log_probs = self.output(base).lm_head(self.norm(states)).float().log_softmax(-1)
        return likeliest_chain(log_probs, recent[:, -1], size)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        return min(self.config.depth, size - 1)
