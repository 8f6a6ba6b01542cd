"""`eagle3`: a decoder layer that drafts token by token (Li et al. 2025, arXiv 2503.01840).

A draft's own keys and values are discarded with it. Committed tokens get entries made of the target model's hidden
states, as published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Loan
from drafter.drafters.target import Target
from drafter.errors import shown
from drafter.heads.config import HeadConfig, Tree, check_sizes
from drafter.heads.contract import DraftHead, check_hidden_layers
from drafter.heads.frame_head import ContextReader, all_hidden_before, rotary_rates, rotate, rotation_table
from drafter.heads.losses import DraftBatch, Labels, LossSum, cross_entropy
from drafter.target_model.prepacked import prepack
from drafter.tree.token_tree import Frontier, TokenTree, best_first_trie

_BEAM = 10  # nodes run per level, as published


@dataclass(frozen=True)
class Eagle3HeadConfig(HeadConfig):
    """Shape of an EAGLE-3 head. The loss unrolls `depth` steps.

    Args:
        hidden_layers: Layers of the target model whose outputs are fused, low to high; see `DraftSpec.hidden_layers`.
        num_heads: Attention heads.
        num_kv_heads: Key-value heads, shared by the attention heads; None for as many.
        head_size: Width of a head, even; None for `hidden_size / num_heads`.
        intermediate_size: Inner width of the gated MLP.
        fusion_norm: Norms before the hidden states are fused: one of all side by side (`whole`), or one of `each`.
        qk_norm: Whether queries and keys are normed, head by head.
        norm_before_residual: Whether the layer's residual stream starts behind the norm of the hidden state.
        norm_output: Whether a step reads the last one's output behind the final norm.
        norm_eps: Added to the variance in all norms.
        rope_theta: Base of the rotary positions.
        rope_scaling: Scales their rates; see `scaled_rates`.
    """

    hidden_layers: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_size: int | None = None
    intermediate_size: int = 704
    fusion_norm: Literal["none", "whole", "each"] = "none"
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "num_heads", "intermediate_size", "rope_theta")
        check_hidden_layers(self.hidden_layers)
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.num_heads} heads")
        if self.head_width % 2 or self.head_width < 2:
            raise ValueError(f"heads must have an even width, not {self.head_width}")
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.kv_heads} heads of keys and values")
        if not bool(scaled_rates(torch.ones(1, device="cpu"), self.rope_scaling or {}).isfinite().all()):
            raise ValueError(f"rope_scaling {shown(self.rope_scaling)} turns heads by angles that are not finite")

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def rotary_rates(self, device: torch.device) -> Tensor:
        """Return rotary angles per position, `[D / 2]` float64."""
        return scaled_rates(rotary_rates(self.rope_theta, self.head_width, device), self.rope_scaling or {})


def fused_layers(count: int) -> tuple[int, ...]:
    """Return the default layers to fuse of a target model with `count` layers: a low, a middle and a high one.

    The published heads read the inputs of layers 2, `count / 2` and `count - 3`; shallower models use their thirds.
    """
    published = (1, count // 2 - 1, count - 4)
    if published[0] < published[1] < published[2]:
        return published
    return tuple(sorted({max(0, count * part // 3 - 1) for part in (1, 2, 3)}))


def scaled_rates(rates: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Return the rates `[D / 2]` as a configuration's `rope_scaling` changes them, by its `rope_type` (or `type`).

    An unknown kind or a missing number raises `ValueError`.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        match kind:
            case "default":
                return rates
            case "linear":
                return rates / float(scaling["factor"])
            case "llama3":
                low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
                # Slow rates are divided by the factor, fast ones stay, those between are mixed.
                turns = float(scaling["original_max_position_embeddings"]) * rates / (2 * math.pi)
                kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
                return kept * rates + (1.0 - kept) * rates / float(scaling["factor"])
    except KeyError as error:
        raise ValueError(f"rope_scaling {kind!r} needs {error.args[0]!r}") from error
    raise ValueError(f"rope_scaling {kind!r} is not known: known are default, linear, llama3")


# Layers.


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
        """Return entries of token embeddings and the hidden states before them `[..., d]`, rotated by `[..., 2, D]`."""
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


class Rollout:
    """R drafts that grow by running the layer on its own outputs behind texts. Shared by training and decoding.

    Args:
        keys: `[C, S, G, D]` cached keys of C texts, each with R / C consecutive drafts; `values` likewise.
        sees: `[R, S]` bool: each draft's attention over its text.
        pending: Entries `[R]` of the pending tokens, which are also cached.
        rotation: `[L, 2, D]` cosine and signed sine of all positions.
    """

    def __init__(
        self, layer: DraftLayer, keys: Tensor, values: Tensor, sees: Tensor, pending: Projected, rotation: Tensor
    ) -> None:
        self._layer, self._pending, self._rotation = layer, pending, rotation
        self._text = (keys, values, sees)
        self._keys, self._values = pending.keys[:, None][:, :0], pending.values[:, None][:, :0]

    def start(self) -> Tensor:
        """Return the outputs `[R, 1, d]` at the pending tokens."""
        pending, nothing = self._pending, self._text[2][:, None, :0]
        return self._layer.finish(pending.residual[:, None], self.attend(pending.queries[:, None], nothing))

    def grow(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        """Return the outputs `[R, F, d]` at new nodes, from their tokens' embeddings and their parents' outputs.

        `sees` `[R, F, P]` is a bool mask over the P nodes so far, themselves included.
        """
        new = self._layer.project(embeddings, hidden, self._rotation[positions])
        self._keys, self._values = torch.cat([self._keys, new.keys], 1), torch.cat([self._values, new.values], 1)
        return self._layer.finish(new.residual, self.attend(new.queries, sees))

    def attend(self, queries: Tensor, sees: Tensor) -> Tensor:
        """Attend from F nodes a draft, `[R, F, H, D]`, to text and P own nodes with one softmax; `[R, F, H · D]`."""
        text_keys, text_values, sees_text = self._text
        count, length, groups, size = text_keys.shape
        queries = queries.reshape(count, -1, queries.shape[1], groups, queries.shape[2] // groups, size) * size**-0.5
        keys, values = (part.unflatten(0, (count, -1)) for part in (self._keys, self._values))
        far = torch.einsum("cafgqd,csgd->cagqfs", queries, text_keys)
        near = torch.einsum("cafgqd,capgd->cagqfp", queries, keys)
        seen = torch.cat([sees_text[:, None].expand(-1, sees.shape[1], -1), sees], 2).unflatten(0, (count, -1))
        scores = torch.cat([far, near], -1).float().masked_fill(~seen[:, :, None, None], -torch.inf)
        far, near = scores.softmax(-1).to(values.dtype).tensor_split([length], -1)
        mixed = torch.einsum("cagqfs,csgd->cafgqd", far, text_values)
        mixed = mixed + torch.einsum("cagqfp,capgd->cafgqd", near, values)
        return mixed.flatten(3).flatten(0, 1)


def sees_entries(place: Tensor, anchors: Tensor) -> Tensor:
    """Return the mask `[R, S]` of drafts with pending tokens at `anchors` `[R]` over entries at `place` `[S]`.

    A text's first token has no hidden state before it, so it makes no entry. A draft behind that token alone starts
    from an entry with a zero hidden state.
    """
    anchors = anchors[:, None]
    return (place <= anchors) & ((place > 0) | (anchors == 0))


class Eagle3Head(DraftHead):
    """A decoder layer, a fusion of the target model's hidden states, and an output layer."""

    algorithm = "eagle3"
    config_class = Eagle3HeadConfig
    config: Eagle3HeadConfig
    no_static_tree = "the static tree needs heads that do not depend on the path: EAGLE-3's layer does"

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

    def start_from(self, base: Target) -> None:
        """Initialise the output layer with the target model's LM head."""
        with torch.no_grad():
            self.output_layer.weight.copy_(self.output(base).lm_head_weight)

    def carried(self, states: Tensor) -> Tensor:
        """Return the next step's input from the layer's outputs, both `[..., d]`."""
        return self.norm(states) if self.config.norm_output else states

    def log_probs(self, states: Tensor) -> Tensor:
        """Return float32 log-probabilities `[..., V]` of draft ids at the layer's outputs `[..., d]`."""
        return self.output_layer(self.norm(states)).float().log_softmax(-1)  # type: ignore[no-any-return]

    def forward(self, base: Target, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        drafted, labels = self.in_draft_ids(batch, labels)
        real = drafted.lengths > 0
        labels = labels[real]
        log_probs = self.log_probs(self.unrolled(base, batch, hidden)[real]).gather(2, labels.tokens)
        return cross_entropy(log_probs, labels, drafted.lengths[real], self.config.depth_decay)

    def unrolled(self, base: Target, batch: DraftBatch, hidden: Tensor) -> Tensor:
        """Return the layer's outputs `[B, A, U, d]` of steps along the text; see `DraftHead.forward`."""
        rollout = self._rollout(base, batch.tokens, hidden, batch.anchors)
        tokens, positions = batch.targets.flatten(0, 1), batch.anchors.flatten()[:, None]
        states = [rollout.start()]
        for step in range(1, self.config.depth):
            sees = torch.ones(len(tokens), 1, step, dtype=torch.bool, device=tokens.device)
            embeddings = base.embed(tokens[:, step - 1 : step])
            states.append(rollout.grow(embeddings, self.carried(states[-1]), positions + step, sees))
        return torch.cat(states, 1).view(*batch.anchors.shape, self.config.depth, -1)

    def _rollout(self, base: Target, tokens: Tensor, hidden: Tensor, anchors: Tensor) -> Rollout:
        """Return drafts at `anchors` `[B, A]` of texts `[B, L]`, text by text."""
        length = tokens.shape[1]
        table = rotation_table(self.config.rotary_rates(hidden.device), length + self.config.depth, hidden.dtype)
        entries = self.layer.project(base.embed(tokens), self.fusion(all_hidden_before(hidden)), table[:length])
        row = torch.arange(len(tokens), device=tokens.device).repeat_interleave(anchors.shape[1])
        sees = sees_entries(torch.arange(length, device=tokens.device), anchors.flatten())
        return Rollout(self.layer, entries.keys, entries.values, sees, entries[row, anchors.flatten()], table)

    def trees_at(
        self, base: Target, tokens: Tensor, hidden: Tensor, anchors: Tensor, size: int, tree: Tree = "exact"
    ) -> TokenTree:
        self.refuse_tree(tree)
        rollout = self._rollout(base, tokens, hidden, anchors)
        pending = tokens.gather(1, anchors).flatten()
        return self.best_tree(base, rollout, pending, anchors.flatten(), Ask(size - 1))

    def drafter(self, base: Target, nodes: int, tree: Tree = "exact") -> Eagle3Drafter:
        self.refuse_tree(tree)
        prepack(self)
        return Eagle3Drafter(self, base, nodes)

    def best_tree(self, base: Target, rollout: Rollout, pending: Tensor, positions: Tensor, ask: Ask) -> TokenTree:
        """Return trees `[R, 1 + ask.nodes]` of R new drafts, from `pending` tokens `[R]` at `positions` `[R]`."""
        outputs: list[Tensor] = []
        children = min(ask.nodes, self._ids)

        def grow(frontier: Frontier) -> tuple[Tensor, Tensor]:
            if not outputs:
                outputs.append(rollout.start())
            else:
                depths, sees = frontier.depths[:, frontier.first :], frontier.ancestors[:, frontier.first :]
                parents, before = frontier.parents[:, frontier.first :], self.carried(torch.cat(outputs, 1))
                hidden = before.gather(1, parents[:, :, None].expand(-1, -1, before.shape[2]))
                # Missing nodes have the root's token, which need not be a draft id.
                ids = frontier.tokens[:, frontier.first :].clamp_max(self._ids - 1)
                embeddings = base.embed(self.base_tokens(ids))
                outputs.append(rollout.grow(embeddings, hidden, positions[:, None] + depths, sees[:, :, 1:]))
            found = self.log_probs(outputs[-1]).topk(children)
            return found.values, found.indices

        tree = best_first_trie(grow, pending, self.config.depth, ask.nodes + 1, _BEAM, ask.least_probability)
        return self.name_nodes(tree)


class Eagle3Drafter(ContextReader, Drafter):
    """Reads each sequence's new tokens into the layer's KV cache, and grows drafts behind them."""

    def __init__(self, head: Eagle3Head, base: Target, nodes: int) -> None:
        config, rates = head.config, head.config.rotary_rates(base.device)
        depth = min(nodes, config.depth)
        # Nothing is written behind the pending token, but drafts have rotary positions there.
        super().__init__(base, depth + 1, rates, layers=1, heads=config.kv_heads, behind=config.depth)
        self.spec = DraftSpec(
            nodes, depth, head.hidden_layers, bounded=self.bounded, bytes_per_token=self.bytes_per_token
        )
        self._head = head

    def open(self, loan: Loan) -> None:
        super().open(loan)
        self._times = loan.times

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        rows = context.tokens.shape[0]
        slots, back, ends = self._recent(rows)
        new = self._read(context, slots, back)
        keys, values = self._texts(rows, context.longest + 1)[0]
        sees = sees_entries(self._place[: keys.shape[1]], context.lengths)
        rollout = Rollout(self._head.layer, keys, values, sees, new[ends], self._rotation)
        self._times.mark("draft")
        return self._head.best_tree(self._base, rollout, context.pending, context.lengths, ask)

    def _read(self, context: DraftContext, slots: Tensor, back: Tensor) -> Projected:
        positions, embeddings, hidden = self._inputs(context, slots, back)
        new = self._head.layer.project(embeddings, self._head.fusion(hidden), self._rotation[positions])
        self._store(positions + slots * self._length, 0, new.keys[None], new.values[None])
        return new
