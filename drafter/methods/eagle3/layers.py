"""EAGLE-3's layers: fusion of hidden states, the decoder layer, and its attention to a text and drafts behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.heads.attention import rotate
from drafter.methods.eagle3.config import Eagle3HeadConfig


class Fusion(nn.Module):
    """Linear map of several hidden states to one, behind the configured norms."""

    def __init__(self, config: Eagle3HeadConfig) -> None:
        super().__init__()
        width, count = config.hidden_size, len(config.hidden_layers)
        sizes = {"none": [], "whole": [count * width], "each": [width] * count}[config.fusion_norm]
        self.norms = nn.ModuleList(nn.RMSNorm(size, config.norm_eps) for size in sizes)
        self.linear = nn.Linear(count * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., K · d]` → `[..., d]`."""
        if self.norms:
            parts = hidden.chunk(len(self.norms), -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], -1)
        return self.linear(hidden)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Projected:
    """Entries inside the layer: queries `[..., H, D]`, keys and values `[..., G, D]`; residual `[..., d]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    residual: Tensor

    def __getitem__(self, index: Tensor | tuple[Tensor, ...]) -> Projected:
        return Projected(*(part[index] for part in vars(self).values()))


@dataclass(frozen=True)
class KnownTexts:
    """Cached keys and values `[C, S, G, D]` of C texts behind which R drafts grow, R / C consecutive ones per text.

    `sees` `[R, S]` masks each draft's attention over its text.
    """

    keys: Tensor
    values: Tensor
    sees: Tensor


class DraftLayer(nn.Module):
    """A pre-norm decoder layer whose attention reads token and hidden state side by side."""

    def __init__(self, config: Eagle3HeadConfig) -> None:
        super().__init__()
        width, heads, kv_heads, size = config.hidden_size, config.num_heads, config.kv_heads, config.head_width
        self._heads = (heads, kv_heads, kv_heads)
        self._size, self._norm_before_residual = size, config.norm_before_residual
        self.token_norm = nn.RMSNorm(width, config.norm_eps)
        self.hidden_norm = nn.RMSNorm(width, config.norm_eps)
        self.qkv = nn.Linear(2 * width, (heads + 2 * kv_heads) * size, bias=False)
        self.query_norm, self.key_norm = (
            nn.RMSNorm(size, config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.out = nn.Linear(heads * size, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, config.norm_eps)
        self.gate_up = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, width, bias=False)

    def project(self, embeddings: Tensor, hidden: Tensor, rotation: Tensor) -> Projected:
        """Return entries as queries, keys and values.

        Args:
            embeddings: `[..., d]` of the tokens.
            hidden: `[..., d]` states before them.
            rotation: `[..., 2, D]` cosine and signed sine at their positions.
        """
        normed = self.hidden_norm(hidden)
        heads = self.qkv(torch.cat([self.token_norm(embeddings), normed], -1)).unflatten(-1, (-1, self._size))
        queries, keys, values = heads.split(self._heads, -2)
        queries, keys = self.query_norm(queries), self.key_norm(keys)
        cos, sin = rotation[..., None, :, :].unbind(-2)
        residual = normed if self._norm_before_residual else hidden
        return Projected(rotate(queries, cos, sin), rotate(keys, cos, sin), values, residual)

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output `[..., d]` from its residual stream and attention's output `[..., H · D]`."""
        states = residual + self.out(mixed)
        gate, up = self.gate_up(self.mlp_norm(states)).chunk(2, -1)
        return states + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def attend(queries: Tensor, texts: KnownTexts, keys: Tensor, values: Tensor, sees: Tensor) -> Tensor:
    """Attend to texts and to the drafts behind them with one softmax; return `[R, F, H · D]`.

    Args:
        queries: `[R, F, H, D]` of the F nodes run per draft.
        texts: Shared between drafts.
        keys: `[R, P, G, D]` of the drafts' own nodes.
        values: `[R, P, G, D]`.
        sees: `[R, F, P]` bool attention mask over own nodes.
    """
    count, length, groups, size = texts.keys.shape
    queries = queries.reshape(count, -1, queries.shape[1], groups, queries.shape[2] // groups, size) * size**-0.5
    keys, values = (part.unflatten(0, (count, -1)) for part in (keys, values))
    far = torch.einsum("cafgqd,csgd->cagqfs", queries, texts.keys)
    near = torch.einsum("cafgqd,capgd->cagqfp", queries, keys)
    seen = torch.cat([texts.sees[:, None].expand(-1, sees.shape[1], -1), sees], 2).unflatten(0, (count, -1))
    scores = torch.cat([far, near], -1).float().masked_fill(~seen[:, :, None, None], -torch.inf)
    far, near = scores.softmax(-1).to(values.dtype).tensor_split([length], -1)
    mixed = torch.einsum("cagqfs,csgd->cafgqd", far, texts.values)
    mixed = mixed + torch.einsum("cagqfp,capgd->cafgqd", near, values)
    return mixed.flatten(3).flatten(0, 1)


class Rollout:
    """R drafts that grow by running the layer on its own outputs behind texts. Shared by training and decoding.

    `pending` are the entries `[R]` of the pending tokens, which are also cached in `texts`.
    """

    def __init__(self, layer: DraftLayer, texts: KnownTexts, pending: Projected) -> None:
        self._layer, self._texts, self._pending = layer, texts, pending
        self._keys, self._values = pending.keys[:, None][:, :0], pending.values[:, None][:, :0]

    def start(self) -> Tensor:
        """Return the outputs `[R, 1, d]` at the pending tokens."""
        pending = self._pending
        nothing = self._texts.sees[:, None, :0]
        mixed = attend(pending.queries[:, None], self._texts, self._keys, self._values, nothing)
        return self._layer.finish(pending.residual[:, None], mixed)

    def grow(self, embeddings: Tensor, hidden: Tensor, rotation: Tensor, sees: Tensor) -> Tensor:
        """Return the outputs `[R, F, d]` at new nodes.

        Args:
            embeddings: `[R, F, d]` of their tokens.
            hidden: `[R, F, d]` outputs at their parents.
            rotation: `[R, F, 2, D]` at their positions.
            sees: `[R, F, P]` bool mask over the P nodes so far, themselves included.
        """
        new = self._layer.project(embeddings, hidden, rotation)
        self._keys, self._values = torch.cat([self._keys, new.keys], 1), torch.cat([self._values, new.values], 1)
        return self._layer.finish(new.residual, attend(new.queries, self._texts, self._keys, self._values, sees))


def sees_entries(place: Tensor, anchors: Tensor) -> Tensor:
    """Return the mask `[R, S]` of drafts with pending tokens at `anchors` `[R]` over entries at `place` `[S]`.

    A text's first token has no hidden state before it, so it makes no entry. A draft behind that token alone starts
    from an entry with a zero hidden state.
    """
    anchors = anchors[:, None]
    return (place <= anchors) & ((place > 0) | (anchors == 0))
