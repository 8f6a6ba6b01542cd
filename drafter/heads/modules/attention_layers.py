"""The layers of the attention draft module: the one forward that training and decoding share.

Every token is fused with the base's hidden state at the position before it, `f_i = W [e(x_i); h_{i-1}]`. From the fused
entry of the pending token, `T` frame queries `f_t + s_j` go through transformer layers. In each layer every frame
attends to the fused context and to the other frames. It is one forward, never a loop over tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.base.prefix_attention import Prefix
from drafter.heads.modules.rotary import rotary_rates, rotate, rotation_table

Memory = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new keys `[B, S, H, D]`, new values) → all keys and values to attend to; see `FrameLayer.forward`."""


class FrameLayer(nn.Module):
    """Pre-norm attention from the frames to context and frames, then a gated MLP on the frames.

    The context passes every layer unchanged. A layer only takes keys and values from it.
    """

    def __init__(self, width: int, num_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        # LayerNorm instead of RMSNorm: on a CPU it is one kernel instead of five.
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, width, bias=False)

    def project(self, entries: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[B, S, H, D]`, queries and keys rotated to their positions.

        Args:
            entries: `[B, S, d]`.
            cos: `[B, S, 1, 1, D]`.
            sin: `[B, S, 1, 1, D]`, the first half negative.
        """
        qkv = self.qkv(self.attention_norm(entries)).unflatten(2, (3, self.num_heads, -1))
        queries, keys = rotate(qkv[:, :, :2], cos, sin).unbind(2)
        return queries, keys, qkv[:, :, 2]

    def forward(self, frames: Tensor, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | Prefix) -> Tensor:
        """Return the frames `[B, F, d]` after the layer.

        Args:
            frames: `[B, F, d]`.
            queries: `[B, F, H, D]`.
            keys: `[C, S', H, D]`. If `C` is not `B`, the frames are those of C texts, one text after another.
                `[S · L, H, D]` where a prefix is seen.
            values: As `keys`.
            seen: A mask, broadcastable to `[C, 1, B·F/C, S']`, or the first positions of each of C texts.
        """
        if isinstance(seen, Prefix):
            queries = queries.reshape(len(seen.lengths), -1, *queries.shape[2:])
            mixed, _ = seen.read(queries, keys, values, queries.shape[-1] ** -0.5)
        else:
            queries = queries.reshape(keys.shape[0], -1, *queries.shape[2:])
            mixed = F.scaled_dot_product_attention(
                queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen
            ).transpose(1, 2)
        frames = frames + self.out(mixed.reshape(frames.shape))
        gate, up = self.gate_up(self.mlp_norm(frames)).chunk(2, -1)
        return frames + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class AttentionLayers(nn.Module):
    """Frames that attend to the whole text and to each other, or to those before them alone.

    Args:
        width: d.
        num_frames: T.
        num_layers: Transformer layers.
        num_heads: Attention heads of a layer; each has an even width.
        intermediate_size: Inner width of the gated MLP.
        rope_theta: Base of the rotary positions.
        causal: Whether a frame attends to no later frame.
    """

    def __init__(
        self,
        width: int,
        num_frames: int,
        num_layers: int,
        num_heads: int,
        intermediate_size: int,
        rope_theta: float,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.width, self.num_frames, self.num_heads, self.rope_theta = width, num_frames, num_heads, rope_theta
        self.embedding_norm = nn.LayerNorm(width)
        self.hidden_norm = nn.LayerNorm(width)
        self.fusion = nn.Linear(2 * width, width, bias=False)
        self.slots = nn.Parameter(0.5 * torch.randn(num_frames, width))
        self.layers = nn.ModuleList(FrameLayer(width, num_heads, intermediate_size) for _ in range(num_layers))

    def fuse(self, embeddings: Tensor, hidden_before: Tensor) -> Tensor:
        """Return fused entries `[..., d]` of embeddings `e(x_i)` `[..., d]` and hidden states `h_{i-1}` `[..., d]`."""
        return self.fusion(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden_before)], -1))  # type: ignore[no-any-return]

    def rotation(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return cosine and signed sine (first half negative) of positions `0..length-1`, `[length, 2, D]`."""
        return rotation_table(rotary_rates(self.rope_theta, self.width // self.num_heads, device), length, dtype)

    def frames(
        self, context: Tensor, starts: Tensor, count: int, rotation: Tensor, seen: Tensor | Prefix, memory: Memory
    ) -> Tensor:
        """Return the last states of the first F frames of each anchor, `[B, A, F, d]`, before any output norm.

        Args:
            context: `[B, W, d]` fused entries whose keys and values are not in the memory yet.
            starts: `[B, A, d]` fused entry of the pending token of each anchor. In decoding B is 1: the entries of all
                rows come in one list, and the rows are its anchors.
            count: F.
            rotation: `[B, W + A·F, 2, D]` cosine and signed sine at the entries' positions, context first.
            seen: bool, broadcastable to `[C, 1, B·A·F/C, S']`: what each frame may attend to among what `memory`
                returns, which belongs to C texts. Or, where all frames of a text see the same, how much of it.
            memory: Takes a layer's new keys and values, returns the keys and values to attend to.
        """
        frames = (starts[:, :, None] + self.slots[:count]).flatten(1, 2)
        cos, sin = rotation[:, :, None, None].unbind(4)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, FrameLayer)
            queries, keys, values = layer.project(torch.cat([context, frames], 1), cos, sin)
            frames = layer(frames, queries[:, context.shape[1] :], *memory(index, keys, values), seen)
        return frames.view(frames.shape[0], starts.shape[1], count, -1)

    def remember(self, context: Tensor, rotation: Tensor, store: Callable[[int, Tensor, Tensor], None]) -> None:
        """Store the keys and values of entries for later frames.

        Args:
            context: `[B, W, d]` fused entries.
            rotation: `[B, W, 2, D]` cosine and signed sine at their positions.
            store: Takes a layer and its keys and values `[B, W, H, D]`.
        """
        cos, sin = rotation[:, :, None, None].unbind(4)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, FrameLayer)
            store(index, *layer.project(context, cos, sin)[1:])
