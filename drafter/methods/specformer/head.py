"""`specformer`: a chain of draft tokens in one forward (Shi et al. 2025, arXiv 2511.20340).

The token's embedding and the hidden states before it are normed and fused. One attention layer reads the text, a linear
map yields a state per draft position, and these attend to one another. The published module fuses the embedding of the
token before the pending one; here it is the pending token's, known when drafting begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.drafters.contract import DraftContext
from drafter.heads.attention import rotary_rates, rotate, rotation_table
from drafter.heads.context_reader import CacheShape, ContextReader, Entries
from drafter.heads.contract import Tree, check_draft_vocab, check_hidden_layers, check_sizes
from drafter.heads.draft_vocabulary import chosen_log_probs
from drafter.heads.frame_head import DraftModule, FrameHead, FrameReader
from drafter.heads.losses import DraftBatch, Labels, LossSum, cross_entropy
from drafter.target.forward import LM_HEAD_INPUT
from drafter.target.model import BaseModel
from drafter.target.prepacked import prepack
from drafter.tree.token_tree import TokenTree, likeliest_chain


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
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=None if mask is None else mask[:, None],
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SpecFormerModule(DraftModule):
    """Computes the states of T = `num_frames` draft positions in one forward from K = `num_layers` hidden states."""

    def __init__(
        self, width: int, num_frames: int, num_layers: int, num_heads: int, intermediate_size: int, rope_theta: float
    ) -> None:
        super().__init__()
        self.width, self.num_frames, self.num_heads, self.rope_theta = width, num_frames, num_heads, rope_theta
        self.input_norms = nn.ModuleList(nn.RMSNorm(width, 1e-6) for _ in range(1 + num_layers))
        self.fusion = nn.Linear((1 + num_layers) * width, width, bias=False)
        self.text_attention = Attention(width, num_heads)
        self.position_norm = nn.RMSNorm(width, 1e-6)
        # Its bias encodes the draft position.
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
        """Return the first F = `count` draft positions, or all, `[N, F, d]`; each attends to all T.

        `pending` `[N, d]` are the pending tokens' entries, and `read` `[N, d]` their attention output over the text.
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
        """Cache the keys and values of entries; return the entries `[E, d]` and their queries `[E, H, D]`."""
        positions, embeddings, hidden = self._inputs(context, entries)
        fused = self._module.fuse(embeddings, hidden)
        queries, keys, values = self._module.project(fused, self._rotation[positions])
        self._store(positions + entries.slots * self._length, 0, keys[None], values[None])
        return fused, queries


@dataclass(frozen=True)
class SpecFormerHeadConfig:
    """Shape of a SpecFormer head.

    Args:
        hidden_size: d, width of the target model's hidden states.
        vocab_size: V, size of the target model's vocabulary.
        hidden_layers: Hidden states that are fused beside the token's embedding; see `DraftSpec.hidden_layers`.
        depth: U, number of draft positions.
        num_heads: Attention heads; each has an even width.
        intermediate_size: Inner width of the gated MLP.
        rope_theta: Base of the rotary positions.
        depth_decay: Weight of a position's loss relative to the position before it.
        draft_vocab_size: Number of tokens that may be drafted, the most frequent ones; None for all.

    Raises:
        ValueError: The sizes do not fit together.
    """

    hidden_size: int
    vocab_size: int
    hidden_layers: tuple[int, ...]
    depth: int = 8
    num_heads: int = 4
    intermediate_size: int = 704
    rope_theta: float = 10_000.0
    depth_decay: float = 0.8
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "hidden_size", "vocab_size", "depth", "num_heads", "intermediate_size", "rope_theta")
        check_draft_vocab(self)
        check_hidden_layers(self)
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.num_heads} heads of even width")


class SpecFormerHead(FrameHead):
    """Predicts each position independently, and drafts the likeliest token of each."""

    algorithm = "specformer"
    config_class = SpecFormerHeadConfig
    config: SpecFormerHeadConfig

    def __init__(self, config: SpecFormerHeadConfig) -> None:
        super().__init__(config)
        self.hidden_layers = config.hidden_layers
        self.module = SpecFormerModule(
            config.hidden_size,
            config.depth,
            len(config.hidden_layers),
            config.num_heads,
            config.intermediate_size,
            config.rope_theta,
        )
        self.norm = nn.RMSNorm(config.hidden_size, 1e-6)

    @classmethod
    def defaults(cls, layers: int) -> dict[str, Any]:
        """Return the published layers: the middle one, the last but one, and the LM head's input."""
        return {"hidden_layers": tuple(dict.fromkeys((max(0, layers // 2 - 1), max(0, layers - 2), LM_HEAD_INPUT)))}

    def forward(self, base: BaseModel, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        real = batch.lengths > 0
        states = self.norm(self.module(base.embed(batch.tokens), hidden, batch.anchors)[real])
        labels = self.draft_targets(batch, labels).labels[real]
        log_probs = chosen_log_probs(self.output(base), states, labels.tokens)
        return cross_entropy(log_probs, labels, batch.lengths[real], self.config.depth_decay)

    def search(self, states: Tensor, recent: Tensor, base: BaseModel, size: int, tree: Tree) -> TokenTree:
        log_probs = self.output(base).lm_head(self.norm(states)).float().log_softmax(-1)
        return likeliest_chain(log_probs, recent[:, -1], size)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        return min(self.config.depth, size - 1)

    def refuse_tree(self, tree: Tree) -> None:
        if tree == "static":
            raise ValueError("the static tree needs alternatives at each depth: SpecFormer drafts a chain")
