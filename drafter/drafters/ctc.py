"""`ctc`: an attention draft module whose frames are read by CTC (Wen, Gui, Feng 2024, arXiv 2412.00061).

The head fuses every token with the base's hidden state at the position before it, `f_i = W [e(x_i); h_{i-1}]`. From
the fused entry of the pending token, `T` frame queries `f_t + s_j` go through transformer layers in which each frame
attends to the fused context and to the other frames. The base's frozen LM head gives the tokens' logits, an output of
its own the blank's. One forward drafts a whole tree.

Training and decoding run the same `CTCHead.frames`; they differ in where keys and values lie and in the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.base_model import BaseModel
from drafter.ctc.static_tree import static_tree
from drafter.ctc.trie import best_lattice_trie, best_trie
from drafter.drafters.contract import DraftContext, Drafter
from drafter.pretrained import DraftHead
from drafter.token_tree import TokenTree

Memory = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new keys `[B, S, H, D]`, new values) → all keys and values to attend to, `[B, S', H, D]`."""

_CONTEXT_BUCKET = 64
"""Context lengths are rounded up to this, so that shapes repeat."""
_SMALL_WIDTH = 8
"""Entries read in an ordinary step; a step accepts fewer, except with a deeper drafter beside this one."""
_CANDIDATES = 64
"""Tokens a row that the exact search looks at (see `best_trie`)."""
_LATTICE_BEAM = 10
"""Prefixes a depth in the lattice search, where each costs a joint and an LM head."""


@dataclass(frozen=True)
class CTCHeadConfig:
    """Shape of a CTC head.

    Args:
        hidden_size: d, of the base.
        vocab_size: V, of the base.
        num_frames: T.
        depth: U, tokens of a target in training and levels of a tree.
        num_layers: Transformer layers.
        num_heads: Attention heads; even width each.
        intermediate_size: Width of the gated MLP.
        label_context: How many of the last labels a frame knows: 0 is the paper's CTC, 1 or 2 the lattice.
        band: With a label context: frame `j` holds label `u` only for `u ≤ j < u + band`.
        joint_size: With a label context: width of the joint of frame and labels.
        rope_theta: Base of the rotary positions.
        blank_bias: Initial log-odds of the blank. Blanks start improbable and are learnt where they pay.
        loss: `prefix` weighs prefix probabilities by depth; `ctc` is the paper's.
        depth_decay: Weight of a label in the prefix loss, relative to the one before.

    Raises:
        ValueError: Sizes that do not fit together.
    """

    hidden_size: int
    vocab_size: int
    num_frames: int = 8
    depth: int = 6
    num_layers: int = 1
    num_heads: int = 4
    intermediate_size: int = 704
    label_context: int = 0
    band: int = 2
    joint_size: int = 256
    rope_theta: float = 10_000.0
    blank_bias: float = -3.0
    loss: Literal["prefix", "ctc"] = "prefix"
    depth_decay: float = 0.8

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "vocab_size", "num_frames", "depth", "num_layers", "num_heads", "intermediate_size")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.num_heads} heads of even width")
        if self.depth > self.num_frames:
            raise ValueError(f"{self.num_frames} frames cannot say {self.depth} tokens: depth is at most num_frames")
        if self.label_context not in (0, 1, 2) or self.band < 1 or self.joint_size < 1:
            raise ValueError("label_context must be 0, 1 or 2; band and joint_size at least 1")
        if self.label_context and self.loss == "ctc":
            raise ValueError("with a label context the loss must be 'prefix'")


class _Layer(nn.Module):
    """Pre-norm attention from the frames to context and frames, then a gated MLP on the frames.

    The context passes every layer unchanged: a layer only takes keys and values from it.
    """

    def __init__(self, config: CTCHeadConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        # LayerNorm rather than RMSNorm: one kernel instead of five on a CPU.
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, width, bias=False)

    def forward(
        self,
        context: Tensor,
        frames: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        remember: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Frames `[B, F, d]` → `[B, F, d]`; see `CTCHead.frames`."""
        entries = self.attention_norm(torch.cat([context, frames], 1))
        qkv = self.qkv(entries).unflatten(2, (3, self.num_heads, -1))
        queries, keys = _rotate(qkv[:, :, :2], cos, sin).unbind(2)
        keys, values = remember(keys, qkv[:, :, 2])
        mixed = F.scaled_dot_product_attention(
            queries[:, context.shape[1] :].transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
        )
        frames = frames + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(frames)).chunk(2, -1)
        return frames + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: `heads` `[B, S, 2, H, D]`, `cos` and signed `sin` `[B, S, 1, 1, D]` (first half negative)."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


class CTCHead(DraftHead):
    """The draft module: everything that trains. The base's embedding and LM head are borrowed, not saved."""

    algorithm = "ctc"
    config_class = CTCHeadConfig
    config: CTCHeadConfig

    def __init__(self, config: CTCHeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embedding_norm = nn.LayerNorm(width)
        self.hidden_norm = nn.LayerNorm(width)
        self.fusion = nn.Linear(2 * width, width, bias=False)
        self.slots = nn.Parameter(0.5 * torch.randn(config.num_frames, width))
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(width)
        self.blank = nn.Linear(width, 1)
        nn.init.zeros_(self.blank.weight)
        nn.init.constant_(self.blank.bias, config.blank_bias)
        if config.label_context:
            self.joint_frames = nn.Linear(width, config.joint_size)
            self.joint_labels = nn.Linear(config.label_context * width, config.joint_size, bias=False)
            self.joint_out = nn.Linear(config.joint_size, width, bias=False)

    def fuse(self, embeddings: Tensor, hidden_before: Tensor) -> Tensor:
        """Fused entries `[..., d]`: embeddings `e(x_i)` `[..., d]` with hidden states `h_{i-1}` `[..., d]`."""
        return self.fusion(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden_before)], -1))  # type: ignore[no-any-return]

    def rotation(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Table `[length, 2, D]` of cosine and signed sine (first half negative) for positions `0..length-1`."""
        half = self.config.hidden_size // self.config.num_heads // 2
        rates = self.config.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        angles = torch.arange(length, device=device)[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1).to(dtype)

    def frames(self, context: Tensor, starts: Tensor, rotation: Tensor, mask: Tensor, memory: Memory) -> Tensor:
        """The frames' last states: the one forward that training and decoding share.

        Args:
            context: `[B, W, d]` fused entries whose keys and values are not in the memory yet.
            starts: `[B, A, d]` fused entry of the pending token of each anchor (in decoding, A = 1).
            rotation: `[B, W + A·T, 2, D]` cosine and signed sine at the entries' positions, context first.
            mask: bool, broadcastable to `[B, 1, A·T, S']`: what each frame may attend to among what `memory` returns.
            memory: Takes a layer's new keys and values, returns those to attend to.

        Returns:
            `[B, A, T, d]`, before the output norm.
        """
        frames = (starts[:, :, None] + self.slots).flatten(1, 2)
        cos, sin = rotation[:, :, None, None].unbind(4)
        for index, layer in enumerate(self.layers):
            frames = layer(context, frames, cos, sin, mask, partial(memory, index))
        return frames.view(frames.shape[0], starts.shape[1], self.config.num_frames, -1)

    def frames_at(self, embeddings: Tensor, hidden: Tensor, anchors: Tensor) -> Tensor:
        """Frames for many anchors of known sequences, each as decoding would compute it there.

        Args:
            embeddings: `[B, L, d]` frozen embeddings of the tokens.
            hidden: `[B, L, d]` the base's last hidden states, after its final norm.
            anchors: `[B, A]` position of the pending token. Its own hidden state and all later ones are not looked at.

        Returns:
            `[B, A, T, d]`.
        """
        batch, length, _ = embeddings.shape
        count, frames = anchors.shape[1], self.config.num_frames
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        context = self.fuse(embeddings, before)
        starts = context.gather(1, anchors[:, :, None].expand(-1, -1, context.shape[-1]))
        place = torch.arange(length, device=anchors.device)
        own = torch.arange(1, frames + 1, device=anchors.device)
        positions = torch.cat([place.expand(batch, -1), (anchors[:, :, None] + own).flatten(1)], 1)
        rotation = self.rotation(length + frames, hidden.device, context.dtype)[positions]
        sees_context = (place <= anchors[:, :, None]).repeat_interleave(frames, 1)
        anchor = torch.arange(count, device=anchors.device).repeat_interleave(frames)
        sees_frames = (anchor[:, None] == anchor).expand(batch, -1, -1)
        mask = torch.cat([sees_context, sees_frames], 2)[:, None]
        return self.frames(context, starts, rotation, mask, lambda _, keys, values: (keys, values))

    def log_probs(self, states: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """`[..., V + 1]` float32 log-probabilities, blank last, of frame states `[..., d]`.

        The blank's output is a log-odds: `p(ε) = σ(z)`, and the tokens share what is left. So its bias means the
        same whatever the vocabulary.
        """
        states = self.norm(states)
        blank = self.blank(states).float()
        tokens = lm_head(states).float().log_softmax(-1)
        return torch.cat([tokens + F.logsigmoid(-blank), F.logsigmoid(blank)], -1)

    def with_labels(self, states: Tensor, labels: Tensor) -> Tensor:
        """Frame states that know the last labels: `s_j + MLP[s_j; e(y)]`.

        Args:
            states: `[..., d]` frame states.
            labels: `[..., c, d]` frozen embeddings of the last `label_context` labels, newest last; leading dimensions
                broadcast with those of `states`.

        Returns:
            `[..., d]`.
        """
        joint = self.joint_frames(states) + self.joint_labels(self.embedding_norm(labels).flatten(-2))
        return states + self.joint_out(F.silu(joint))  # type: ignore[no-any-return]

    def search(self, states: Tensor, recent: Tensor, base: BaseModel, size: int) -> TokenTree:
        """The best trie of `size` nodes, root included.

        Args:
            states: `[B, T, d]` frame states.
            recent: `[B, max(1, label_context)]` last tokens, the pending one last.
            base: Lends its embedding and LM head.
            size: Nodes of a tree.
        """
        config = self.config
        if not config.label_context:
            return best_trie(self.log_probs(states, base.lm_head), recent[:, -1], config.depth, size, _CANDIDATES)

        def joint(first: int, stop: int, labels: Tensor) -> Tensor:
            known = self.with_labels(states[:, None, first:stop], base.embed(labels)[:, :, None])
            return self.log_probs(known, base.lm_head)

        return best_lattice_trie(joint, recent, config.num_frames, config.band, config.depth, size, _LATTICE_BEAM)

    def trees_at(self, base: BaseModel, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int) -> TokenTree:
        """Trees `[B * A, size]` at `anchors` `[B, A]`; see `DraftHead.trees_at`."""
        states = self.frames_at(base.embed(tokens), hidden, anchors).flatten(0, 1)
        recent = recent_tokens(tokens, anchors, max(1, self.config.label_context)).flatten(0, 1)
        return self.search(states, recent, base, size)

    def drafter(self, base: BaseModel, tree_size: int) -> CTCDrafter:
        """A drafter of exact tries of `tree_size` nodes, root included."""
        return CTCDrafter(self, base, tree_size=tree_size)


def recent_tokens(tokens: Tensor, anchors: Tensor, count: int) -> Tensor:
    """`[B, A, count]` the last tokens of `tokens` `[B, L]` up to each of `anchors` `[B, A]`, the anchor's own last."""
    back = torch.arange(1 - count, 1, device=tokens.device)
    index = (anchors[:, :, None] + back).clamp_min(0)
    return tokens.gather(1, index.flatten(1)).view(index.shape)


class CTCDrafter(Drafter):
    """Drafts with a CTC head; keeps the keys and values of the fused context for every slot, allocated once.

    Args:
        head: The draft head, on the base's device and in its dtype.
        base: Lends its embedding and LM head.
        tree_size: Nodes of a tree, root included.
        tree: `exact` is the best trie of the frames, `static` the published tree with collapsed paths.
    """

    reads_hidden = True

    def __init__(
        self,
        head: CTCHead,
        base: BaseModel,
        *,
        tree_size: int = 65,
        tree: Literal["exact", "static"] = "exact",
    ) -> None:
        if tree == "static" and head.config.label_context:
            raise ValueError("the static tree needs frames that do not depend on labels: label_context 0")
        self.head, self.base = head, base
        self.tree_size, self.depth = tree_size, head.config.depth
        self.tree = tree
        self._read: list[int] = []  # entries of each slot whose keys and values are in the cache

    def allocate(self, slots: int, length: int) -> None:
        """Make room for `slots` rows of `length` tokens and the frames behind them."""
        config, device, dtype = self.head.config, self.base.device, self.base.dtype
        self._length = length + config.num_frames + 1
        shape = (slots * self._length, config.num_layers, 2, config.num_heads, config.hidden_size // config.num_heads)
        self._cache = torch.zeros(shape, device=device, dtype=dtype)
        self._rotation = self.head.rotation(self._length, device, dtype)
        self._place = torch.arange(self._length, device=device)
        self._slot = torch.arange(slots, device=device)[:, None]
        self._read = [0] * slots

    def admit(self, slot: int) -> None:
        """Nothing of the slot's new row is in the cache."""
        self._read[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Copy the cached context."""
        rows = self._cache.unflatten(0, (-1, self._length))
        rows[target, : self._read[source]] = rows[source, : self._read[source]]
        self._read[target] = self._read[source]

    def propose(self, context: DraftContext) -> TokenTree:
        """Trees `[B, tree_size]`: read what is new, compute the frames, find the trie."""
        rows = context.tokens.shape[0]
        known = context.host_lengths
        fresh = [length + 1 - self._read[slot] for slot, length in enumerate(known)]
        # A row that has just entered brings its whole prompt; it is read alone, not by padding the others to it.
        if rows > 1:
            for slot, count in enumerate(fresh):
                if count > _SMALL_WIDTH:
                    self._states(context, slot, slot + 1, count)
                    fresh[slot] = 1
        states = self._states(context, 0, rows, max(fresh))
        self._read[:rows] = [length + 1 for length in known]
        recent = recent_tokens(context.tokens, context.lengths[:, None], max(1, self.head.config.label_context))[:, 0]
        if self.tree == "static":
            log_probs = self.head.log_probs(states, self.base.lm_head)
            return static_tree(log_probs, recent[:, -1], self.depth, self.tree_size)
        return self.head.search(states, recent, self.base, self.tree_size)

    def _states(self, context: DraftContext, first: int, stop: int, fresh: int) -> Tensor:
        """Frame states `[b, T, d]` of slots `first..stop-1`, whose last `fresh` entries at most are new.

        The window of entries that is read ends at the pending token and has one of a few fixed widths, so it may
        reach back: an entry read twice gets the same keys and values. The frames' own go behind the pending
        token's, where the next window overwrites them.
        """
        head, frames = self.head, self.head.config.num_frames
        assert context.hidden is not None
        width = max(_SMALL_WIDTH, 1 << (fresh - 1).bit_length())
        lengths = context.lengths[first:stop, None]
        positions = (lengths + torch.arange(1 - width, frames + 1, device=lengths.device)).clamp_min(0)
        slots = self._slot[first:stop]
        places = (positions + slots * self._length).flatten()
        entries = positions[:, :width]
        before = ((entries - 1).clamp_min(0) + slots * context.hidden.shape[1]).flatten()
        hidden = context.hidden.flatten(0, 1).index_select(0, before).view(stop - first, width, -1)
        hidden = hidden * (entries > 0)[..., None]
        fused = head.fuse(self.base.embed(context.tokens[first:stop].gather(1, entries)), hidden)

        bound = -(-(context.longest + 1 + frames) // _CONTEXT_BUCKET) * _CONTEXT_BUCKET
        bound = min(bound, self._length)
        mask = (self._place[:bound] <= lengths + frames)[:, None, None]
        rows = self._cache.unflatten(0, (-1, self._length))[first:stop, :bound]

        def memory(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._cache[:, layer].index_copy_(0, places, torch.stack([keys, values], 2).flatten(0, 1))
            return rows[:, :, layer, 0], rows[:, :, layer, 1]

        rotation = self._rotation.index_select(0, positions.flatten()).view(*positions.shape, 2, -1)
        return head.frames(fused, fused[:, -1:], rotation, mask, memory)[:, 0]
