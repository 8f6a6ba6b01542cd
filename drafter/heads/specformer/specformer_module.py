"""SpecFormer's layers: from hidden states of several layers to all draft positions at once.

The token's embedding and the base's hidden states before it are normed one by one and fused. One attention layer reads
the text so far. A linear map makes of what it read a state for each draft position, and these attend to one another.

The published module fuses the embedding of the token before the pending one. Here it is the pending token's own, which
is known when drafting begins.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.base.causal_lm import BaseModel
from drafter.base.executors.prepacked import prepack
from drafter.drafters.contract import DraftContext
from drafter.heads.modules.context_reader import CacheShape, ContextReader, Entries
from drafter.heads.modules.contract import DraftModule, FrameReader
from drafter.heads.modules.rotary import rotary_rates, rotate, rotation_table


class Attention(nn.Module):
    """Pre-norm multi-head attention; who attends to whom is its caller's matter."""

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
        """Return what queries `[B, Q, H, D]` read of keys and values `[B, S, H, D]`, `[B, Q, d]`.

        Args:
            queries: Of those that read.
            keys: Of those that are read.
            values: Likewise.
            mask: `[B, Q, S]` bool; None lets all read all.
        """
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=None if mask is None else mask[:, None],
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SpecFormerModule(DraftModule):
    """Computes the states of all draft positions in one forward.

    Args:
        width: d.
        num_frames: T, number of draft positions.
        num_layers: K, number of hidden states that are read.
        num_heads: Attention heads; each has an even width.
        intermediate_size: Inner width of the gated MLP.
        rope_theta: Base of the rotary positions in the text.
    """

    def __init__(
        self, width: int, num_frames: int, num_layers: int, num_heads: int, intermediate_size: int, rope_theta: float
    ) -> None:
        super().__init__()
        self.width, self.num_frames, self.num_heads, self.rope_theta = width, num_frames, num_heads, rope_theta
        self.input_norms = nn.ModuleList(nn.RMSNorm(width, 1e-6) for _ in range(1 + num_layers))
        self.fusion = nn.Linear((1 + num_layers) * width, width, bias=False)
        self.text_attention = Attention(width, num_heads)
        self.position_norm = nn.RMSNorm(width, 1e-6)
        # Its bias is what a draft position knows of its place.
        self.positions = nn.Linear(width, num_frames * width)
        self.draft_attention = Attention(width, num_heads)
        self.mlp_norm = nn.RMSNorm(width, 1e-6)
        self.gate_up = nn.Linear(width, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, width, bias=False)

    def fuse(self, embeddings: Tensor, hidden_before: Tensor) -> Tensor:
        """Return fused entries `[..., d]` of embeddings `[..., d]` and hidden states before them `[..., K · d]`."""
        parts = (embeddings, *hidden_before.chunk(len(self.input_norms) - 1, -1))
        normed = [norm(part) for norm, part in zip(self.input_norms, parts, strict=True)]
        return self.fusion(torch.cat(normed, -1))  # type: ignore[no-any-return]

    def rotation(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return cosine and signed sine (first half negative) of positions `0..length-1`, `[length, 2, D]`."""
        return rotation_table(rotary_rates(self.rope_theta, self.width // self.num_heads, device), length, dtype)

    def project(self, entries: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[..., H, D]` of entries `[..., d]`, at the positions of `[..., 2, D]`."""
        queries, keys, values = self.text_attention.project(entries)
        cos, sin = rotation[..., None, :, :].unbind(-2)
        return rotate(queries, cos, sin), rotate(keys, cos, sin), values

    def frames(self, pending: Tensor, read: Tensor, count: int | None) -> Tensor:
        """Return the first `count` draft positions, or all, `[N, F, d]`, which all attend to all T.

        Args:
            pending: `[N, d]` the pending tokens' entries.
            read: `[N, d]` what they have read of the text.
            count: F.
        """
        states = self.positions(self.position_norm(pending + read)).unflatten(-1, (self.num_frames, -1))
        queries, keys, values = self.draft_attention.project(states)
        states = states[:, :count] + self.draft_attention.mix(queries[:, :count], keys, values)
        gate, up = self.gate_up(self.mlp_norm(states)).chunk(2, -1)
        return states + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]

    def forward(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor, count: int | None = None) -> Tensor:
        """Return frames `[B, A, F, d]`; see `DraftModule.forward`."""
        place = torch.arange(embeddings.shape[1], device=anchors.device)
        entries = self.fuse(embeddings, torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1))
        queries, keys, values = self.project(entries, self.rotation(len(place), hidden.device, entries.dtype))
        row = torch.arange(len(anchors), device=anchors.device)[:, None]
        read = self.text_attention.mix(queries[row, anchors], keys, values, place <= anchors[:, :, None])
        frames = self.frames(entries[row, anchors].flatten(0, 1), read.flatten(0, 1), count)
        return frames.view(*anchors.shape, *frames.shape[1:])

    def reader(self, base: BaseModel, fresh: int) -> FrameReader:
        """Return a reader with a cache of the text's keys and values."""
        prepack(self)
        return _SpecFormerReader(self, base, fresh)


class _SpecFormerReader(ContextReader, FrameReader):
    def __init__(self, module: SpecFormerModule, base: BaseModel, fresh: int) -> None:
        super().__init__(base, fresh, CacheShape(1, module.num_heads, module.width // module.num_heads))
        self._module = module

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        rows = context.tokens.shape[0]
        entries, ends = self._recent(rows)
        fused, queries = self._read(context, entries)
        keys, values = self._texts(rows, context.longest + 1)[0]
        seen = (self._place[: keys.shape[1]] <= context.lengths[:, None])[:, None]
        read = self._module.text_attention.mix(queries[ends][:, None], keys, values, seen)
        return self._module.frames(fused[ends], read[:, 0], count)

    def _rotation_table(self, length: int) -> Tensor:
        return self._module.rotation(length, self._base.device, self._base.dtype)

    def _remember(self, context: DraftContext, entries: Entries) -> None:
        self._read(context, entries)

    def _read(self, context: DraftContext, entries: Entries) -> tuple[Tensor, Tensor]:
        """Store the keys and values of entries; return the entries `[E, d]` and their queries `[E, H, D]`."""
        positions, embeddings, hidden = self._inputs(context, entries)
        fused = self._module.fuse(embeddings, hidden)
        queries, keys, values = self._module.project(fused, self._rotation[positions])
        self._store(positions + entries.slots * self._length, 0, keys[None], values[None])
        return fused, queries
