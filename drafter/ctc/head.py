"""CTC head (Wen, Gui, Feng 2024, arXiv 2412.00061): one forward drafts a whole tree.

Without a label context the frames are independent, and CTC prefix search finds trees; with one, lattice search does.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter import devices
from drafter.ctc.config import CTCHeadConfig
from drafter.ctc.lattice import LATTICE_BEAM, best_lattice_trie
from drafter.ctc.losses import ctc_loss, lattice_prefix_loss, prefix_loss
from drafter.ctc.prefix_search import best_trie, static_tree
from drafter.drafters.target import Target
from drafter.heads.attention import AttentionModule
from drafter.heads.config import Tree
from drafter.heads.frame_head import FrameHead, ResidualBlocks, Search, last_tokens
from drafter.heads.losses import DraftBatch, Labels, LossSum, chosen_log_probs, cross_entropy
from drafter.native.build import (
    BuildError,
    JointLayerStruct,
    JointStruct,
    LabelTableStruct,
    PackedWeights,
    SearchStruct,
    UnsuitableError,
    library,
)
from drafter.tree.token_tree import TokenTree, best_product_trie, likeliest_chain

_log = logging.getLogger(__name__)

_CANDIDATES = 64  # tokens per row that the prefix search considers; see `best_trie`
_SMALLER = 2  # the factor must be this many times smaller than the LM head, to make up for computing the frames' logits
MOST_ENTRIES = 1 << 25
"""Numbers in the largest table of label terms, 128 MiB."""


class CTCHead(FrameHead):
    """The target model's embedding and LM head are borrowed and not saved."""

    algorithm = "ctc"
    config_class = CTCHeadConfig
    config: CTCHeadConfig
    no_static_tree = None
    has_chain = True
    _factor: Tensor | None = None  # derived from the weights for the search in decoding

    def __init__(self, config: CTCHeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.recent_tokens = max(1, config.label_context)
        if config.label_context:
            self.no_static_tree = "the static tree needs frames that do not depend on labels: label_context 0"
        if config.module == "linear":
            self.module = ResidualBlocks(width, config.num_frames)
        else:
            self.module = AttentionModule(
                width,
                config.num_frames,
                config.num_layers,
                config.num_heads,
                config.intermediate_size,
                config.rope_theta,
                config.causal,
            )
        self.norm = nn.LayerNorm(width)
        if config.loss != "ce":
            self.blank = nn.Linear(width, 1)
            nn.init.zeros_(self.blank.weight)
            nn.init.constant_(self.blank.bias, config.blank_bias)
        if config.label_context:
            # The norm has no parameters, so the embeddings of labels need no gradient.
            self.label_norm = nn.LayerNorm(width, elementwise_affine=False)
            self.joint_frames = nn.Linear(width, config.joint_size)
            self.joint_labels = nn.Linear(config.label_context * width, config.joint_size, bias=False)
            self.joint_out = nn.Linear(config.joint_size, width, bias=False)
            self.joint_layers = nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, config.joint_size),
                    nn.SiLU(),
                    nn.Linear(config.joint_size, width, bias=False),
                )
                for _ in range(config.joint_layers - 1)
            )

    def token_log_probs(self, states: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return float32 log-probabilities `[..., V]` of tokens, if frames of `states` `[..., d]` emit one."""
        return lm_head(self.norm(states)).float().log_softmax(-1)

    def log_probs(self, states: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return float32 log-probabilities `[..., V + 1]` of all symbols, blank last, of frame states `[..., d]`."""
        blank, emit = self.blank_log_probs(self.norm(states))
        return torch.cat([self.token_log_probs(states, lm_head) + emit, blank], -1)

    def blank_log_probs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `[..., 1]` of the blank and of all tokens together, of normalised states `[..., d]`.

        The blank's output `z` is a log-odds: `p(ε) = σ(z)`. So its bias means the same for every vocabulary size.
        """
        blank = self.blank(states).float()
        return F.logsigmoid(blank), F.logsigmoid(-blank)

    def label_terms(self, base: Target, labels: Tensor) -> Tensor:
        """Return what the last labels `[..., c]`, newest last, add to the joint network's first layer."""
        return self.joint_labels(self.label_norm(base.embed(labels)).flatten(-2))  # type: ignore[no-any-return]

    def joint(self, states: Tensor, terms: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return frame states with a label context, `[..., d]`: `s_j + MLP[s_j; e(y)]`, then residual layers.

        `terms` `[..., joint_size]` is the first layer's pre-activation: `joint_frames` of the states plus
        `label_terms`. Return also the activations of the layers; `joint` adds `joint_spans` times them.
        """
        activations = [F.silu(terms)]
        states = states + self.joint_out(activations[0])
        for layer in self.joint_layers:
            norm, inner, silu, out = layer.children()
            activations.append(silu(inner(norm(states))))
            states = states + out(activations[-1])
        return states, activations

    @property
    def joint_spans(self) -> Tensor:
        """Output weights of all layers of the joint network, concatenated, `[d, R]`."""
        spans = [self.joint_out.weight]
        for layer in self.joint_layers:
            *_, out = layer.children()
            assert isinstance(out.weight, Tensor)
            spans.append(out.weight)
        return torch.cat(spans, 1)

    def forward(self, base: Target, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        config = self.config
        drafted, labels = self.in_draft_ids(batch, labels)
        # Cross-entropy treats each token by itself; the other losses end where a tree cannot go on.
        lengths = batch.lengths if config.loss == "ce" else drafted.lengths
        real = lengths > 0
        count = self.frames_for(config.depth + 1, "exact")
        states = self.module(base.embed(batch.tokens), hidden, batch.anchors, count)[real]
        targets, lengths, labels = drafted.targets[real], lengths[real], labels[real]
        if config.label_context:
            known = last_tokens(batch.tokens, batch.anchors, config.label_context)[real]
            text = torch.cat([known, batch.targets[real]], 1)
            return self._lattice_loss(base, states, text, targets, lengths, labels)
        states = self.norm(states)
        if config.loss == "ce":
            log_probs = chosen_log_probs(self.output(base), states, labels.tokens)
            return cross_entropy(log_probs, labels, lengths, config.depth_decay)
        # Each row has its own small alphabet: targets and labels, then the blank. A repeated token has the index of its
        # first occurrence.
        names = torch.cat([targets, labels.tokens.flatten(1)], 1)
        places = (names[:, :, None] == names[:, None]).int().argmax(2)
        blank, emit = self.blank_log_probs(states)
        chosen = chosen_log_probs(self.output(base), states, names[:, None].expand(-1, states.shape[1], -1))
        log_probs = torch.cat([chosen + emit, blank], 2)
        target_places, label_places = places.tensor_split([targets.shape[1]], 1)
        if config.loss == "ctc":
            return ctc_loss(log_probs, target_places, lengths)
        labels = Labels(label_places.view(labels.tokens.shape), labels.probs)
        return prefix_loss(log_probs, target_places, lengths, config.depth_decay, labels)

    def _lattice_loss(
        self, base: Target, states: Tensor, text: Tensor, targets: Tensor, lengths: Tensor, labels: Labels
    ) -> LossSum:
        """Return the prefix loss of frames `[N, F, d]` with a label context.

        `text` `[N, c + U]` has `c` tokens up to the pending one, then the targets; `targets` `[N, U]` and `labels`
        `[N, U, K]` are in draft ids.
        """
        config = self.config
        depth, frames = config.depth, states.shape[1]
        band = torch.arange(depth, device=text.device)[:, None] + torch.arange(config.band, device=text.device)
        band = band.clamp_max(frames - 1)
        # Each token is embedded once, though it is in the context of several labels.
        known = self.label_norm(base.embed(text)).unfold(1, config.label_context, 1)[:, :depth]
        label_terms = self.joint_labels(known.transpose(2, 3).flatten(2))
        terms = self.joint_frames(states)[:, band] + label_terms[:, :, None]
        states = self.norm(self.joint(states[:, band], terms)[0])
        blank, emit = self.blank_log_probs(states)
        tokens = torch.cat([targets[:, :, None], labels.tokens], 2)
        chosen = chosen_log_probs(self.output(base), states, tokens[:, :, None].expand(-1, -1, config.band, -1)) + emit
        choices = (chosen[..., 1:], labels.probs)
        return lattice_prefix_loss(chosen[..., 0], blank[..., 0], lengths, frames, choices, config.depth_decay)

    def search(
        self, states: Tensor, recent: Tensor, base: Target, size: int, tree: Tree, least: float = 0.0
    ) -> TokenTree:
        config, pending = self.config, recent[:, -1]
        if config.label_context:
            return self._search_lattice(states, recent, size, least, base, _beam(tree))
        blank = config.loss != "ce"
        log_probs = (self.log_probs if blank else self.token_log_probs)(states, self.output(base).lm_head)
        if tree == "static":
            return static_tree(log_probs, pending, config.depth, size, blank=blank)
        if blank:
            return best_trie(log_probs, pending, config.depth, size, _CANDIDATES, _prefix_beam(tree))
        return (likeliest_chain if tree == "chain" else best_product_trie)(log_probs, pending, size)

    def native_search(self, base: Target, tree: Tree) -> Search | None:
        lattice = bool(self.config.label_context)
        searched = lattice or (tree != "static" and self.config.loss != "ce")
        if searched and not devices.is_asynchronous(base.device) and base.dtype == torch.float32:
            return NativeSearch(self, base, _beam(tree) if lattice else _prefix_beam(tree))
        return None

    def prepared_search(self, base: Target, tree: Tree) -> Search:
        try:
            if (native := self.native_search(base, tree)) is not None:
                return native
        except (BuildError, UnsuitableError) as reason:
            _log.warning("the CTC head drafts without the native library, which is slower: %s", reason)
        search = super().prepared_search(base, tree)
        # On a CPU improbable paths are pruned, so the LM head is read for few and a factor does not pay.
        if not (self.config.label_context and devices.is_asynchronous(base.device) and is_factored(self, base)):
            return search
        self._factor = label_factor(self, base)
        return partial(self._search_lattice, base=base, beam=_beam(tree), factor=self._factor)

    def weights_changed(self, base: Target) -> None:
        if self._factor is not None:
            self._factor.copy_(label_factor(self, base))

    def _search_lattice(
        self,
        states: Tensor,
        recent: Tensor,
        size: int,
        least: float,
        base: Target,
        beam: int,
        factor: Tensor | None = None,
    ) -> TokenTree:
        model = FrameLattice(self, base, states, recent, factor)
        band, depth = self.config.band, self.config.depth
        return best_lattice_trie(model, recent[:, -1], states.shape[1], band, depth, size, beam, least)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        config = self.config
        levels = min(config.depth, size - 1)
        if config.label_context:
            return min(levels + config.band - 1, config.num_frames)
        return levels if config.loss == "ce" and tree != "static" else None


def _beam(tree: Tree) -> int:
    """Return how many prefixes of each depth a lattice search keeps: one makes a chain."""
    return 1 if tree == "chain" else LATTICE_BEAM


def _prefix_beam(tree: Tree) -> int | None:
    """Return the same of a prefix search, which is exact without a limit."""
    return 1 if tree == "chain" else None


class FrameLattice:
    """`LabelModel` that runs the head on frame states `[B, F, d]`.

    The state of a path is its last `c` tokens, as ids of the target model, at first `recent` `[B, c]`. With a factor of
    `label_factor` it reads the LM head once per draft, not once per tree level. The search must then extend all paths
    of a level: they come ordered by row, the same number for each.
    """

    def __init__(
        self, head: CTCHead, base: Target, states: Tensor, recent: Tensor, factor: Tensor | None = None
    ) -> None:
        self._head, self._states, self._recent, self._factor = head, states, recent, factor
        self._base, self._lm_head = base, head.output(base).lm_head
        self._frame_terms: Tensor = head.joint_frames(states)
        if factor is not None:
            self._frame_logits = self._lm_head(_centred(head, states))

    def start(self) -> Tensor:
        return self._recent

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([state[:, 1:], self._head.base_tokens(tokens)[:, None]], 1)

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        head = self._head
        terms = self._frame_terms[rows, first:stop] + head.label_terms(self._base, state)[:, None]
        states, activations = head.joint(self._states[rows, first:stop], terms)
        normed = head.norm(states)
        if self._factor is None:
            logits = self._lm_head(normed)
        else:
            logits = self._factored_logits(self._factor, first, states, activations)
        return logits.softmax(-1, dtype=torch.float32), head.blank(normed)[..., 0].float().sigmoid()

    def _factored_logits(self, factor: Tensor, first: int, states: Tensor, activations: list[Tensor]) -> Tensor:
        """Return the logits `[M, frames, V]` up to rounding."""
        paths, frames = states.shape[:2]
        scale = (states.float().var(-1, correction=0, keepdim=True) + self._head.norm.eps).rsqrt().to(states)
        known = torch.cat([*(layer * scale for layer in activations), torch.ones_like(scale)], -1)
        # A row's paths share its frames: `own` selects the logits of each path's frame.
        own = torch.eye(frames, device=scale.device, dtype=scale.dtype) * scale
        logits: Tensor = (known.flatten(0, 1) @ factor).unflatten(0, (len(self._states), -1))
        logits.baddbmm_(own.view(*logits.shape[:2], frames), self._frame_logits[:, first : first + frames])
        return logits.view(paths, frames, -1)


@torch.no_grad()
def label_factor(head: CTCHead, base: Target) -> Tensor:
    """Return the LM head applied to the joint network's output weights: `[R + 1, V]`, `(W·c(O))ᵀ`, then `W·β`.

    The LM head must have no bias.
    """
    spans = _centred(head, head.joint_spans.T)
    return head.output(base).lm_head(torch.cat([spans, head.norm.bias[None]]))


def is_factored(head: CTCHead, base: Target) -> bool:
    """Return whether the logits can be factored, and a level then reads less."""
    spans = head.joint_spans
    return head.output(base).lm_head_bias is None and _SMALLER * (spans.shape[1] + 1) <= len(spans)


def _centred(head: CTCHead, states: Tensor) -> Tensor:
    """`c(x)` of states `[..., d]`."""
    return head.norm.weight * (states - states.mean(-1, keepdim=True))


class NativeSearch:
    """The search for the best trees in the native library, one call per step, for a head with frozen weights.

    With a label context that is lattice search, and without one prefix search.

    Args:
        beam: Prefixes kept at each depth; None for all that may be in a tree, which is for prefix search.

    Raises `BuildError` if the library cannot be compiled here, and `UnsuitableError` if the weights are not fp32 on a
    CPU, or the table of label terms would be too large.
    """

    @torch.no_grad()
    def __init__(self, head: CTCHead, base: Target, beam: int | None) -> None:
        output = head.output(base)
        self._config, self._beam = head.config, beam
        self._weights = weights = PackedWeights()
        self._joint = JointStruct(
            norm_weight=weights.address(head.norm.weight),
            norm_bias=weights.address(head.norm.bias),
            blank_weight=weights.address(head.blank.weight),
            blank_bias=weights.address(head.blank.bias),
            head=weights.matrix(output.lm_head_weight, output.lm_head_bias),
            hidden=self._config.hidden_size,
        )
        self._labels = None
        if self._config.label_context:
            self._labels = LabelTerms(head, base)
            self._add_joint_network(head)

    def _add_joint_network(self, head: CTCHead) -> None:
        joint, weights = self._joint, self._weights
        joint.frames = weights.matrix(head.joint_frames.weight, head.joint_frames.bias)
        joint.out = weights.matrix(head.joint_out.weight)
        joint.layers = layers = (JointLayerStruct * len(head.joint_layers))()
        joint.layer_count, joint.terms = len(layers), self._config.joint_size
        for struct, layer in zip(layers, head.joint_layers, strict=True):
            norm, inner, _, out = layer.children()
            assert isinstance(norm, nn.LayerNorm)
            assert isinstance(inner, nn.Linear)
            assert isinstance(out, nn.Linear)
            struct.norm_weight, struct.norm_bias = weights.address(norm.weight), weights.address(norm.bias)
            struct.inner, struct.out = weights.matrix(inner.weight, inner.bias), weights.matrix(out.weight)

    def __call__(self, states: Tensor, recent: Tensor, size: int, least: float) -> TokenTree:
        """Return trees `[B, size]` in draft ids; see `frame_head.Search`."""
        config = self._config
        rows, frames, _ = states.shape
        states, pending = states.contiguous(), recent[:, -1].contiguous()
        tokens, parents, depths = (torch.empty(rows, size, dtype=torch.long) for _ in range(3))
        log_probs = torch.empty(rows, size, dtype=torch.float32)
        search = SearchStruct(
            states=states.data_ptr(),
            rows=rows,
            frames=frames,
            band=config.band,
            depth=config.depth,
            size=size,
            beam=self._beam or size,
            least=least,
            pending=pending.data_ptr(),
            tokens=tokens.data_ptr(),
            parents=parents.data_ptr(),
            depths=depths.data_ptr(),
            log_probs=log_probs.data_ptr(),
            threads=torch.get_num_threads(),
        )
        if self._labels is not None:
            known = recent.flatten()
            recent_terms = self._labels.of_texts(known)
            search.labels = LabelTableStruct(
                self._labels.table.data_ptr(),
                recent_terms.data_ptr(),
                config.label_context,
                self._labels.table.shape[1],
                len(known),
            )
        library().drafter_search(ctypes.byref(self._joint), ctypes.byref(search))
        return TokenTree(tokens, parents, depths, log_probs)


class LabelTerms:
    """What tokens add to the first layer of the joint network.

    Attributes:
        table: `[c, V, joint_size]` terms of the tokens that may be drafted, at each position of the label context.
    """

    def __init__(self, head: CTCHead, base: Target) -> None:
        config, tokens = head.config, len(head.output(base).lm_head_weight)
        entries = config.label_context * tokens * config.joint_size
        if entries > MOST_ENTRIES:
            raise UnsuitableError(
                f"its table of label terms would have {entries} numbers: train it with a smaller label_context, "
                "joint_size or draft_vocab_size"
            )
        self._head, self._base = head, base
        # [joint_size, c, d]
        self._label_weights = head.joint_labels.weight.unflatten(1, (config.label_context, -1))
        self.table = self._terms(head.base_tokens(torch.arange(tokens)))

    def of_texts(self, tokens: Tensor) -> Tensor:
        """Return terms `[c, N, joint_size]` of tokens `[N]`, by the table where they may be drafted, as most may."""
        vocabulary = self._head.vocabulary
        if vocabulary is None:
            return self.table.index_select(1, tokens)
        ids = vocabulary.ids.index_select(0, tokens)
        terms = self.table.index_select(1, ids.clamp_min(0))
        if len(others := (ids < 0).nonzero()[:, 0]):
            terms[:, others] = self._terms(tokens[others])
        return terms

    def _terms(self, tokens: Tensor) -> Tensor:
        labels = self._head.label_norm(self._base.embed(tokens))
        return torch.stack([labels.float() @ weights.T for weights in self._label_weights.unbind(1)])
