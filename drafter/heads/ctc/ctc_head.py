"""`ctc`: frames read by CTC (Wen, Gui, Feng 2024, arXiv 2412.00061). One forward drafts a whole tree.

A draft module makes `T` frames of the text so far. The base's frozen LM head gives each frame's tokens, an output of
its own the blank. With a label context the frames also know the last labels, through a small joint (the stateless
transducer of speech recognition), and are read as a lattice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter import devices
from drafter.base.causal_lm import BaseModel
from drafter.heads.chosen_log_probs import chosen_log_probs
from drafter.heads.contract import Tree, check_sizes
from drafter.heads.ctc.ctc_losses import ctc_loss, lattice_prefix_loss, prefix_loss
from drafter.heads.ctc.frame_lattice import FrameLattice, PreparedLattices
from drafter.heads.draft_batch import DraftBatch
from drafter.heads.frame_head import FrameHead, Search, last_tokens
from drafter.heads.losses import Labels, LossSum, cross_entropy
from drafter.heads.modules.attention import AttentionModule
from drafter.heads.modules.residual import ResidualBlocks
from drafter.search.contract import LabelModel
from drafter.search.ctc_prefix import best_trie
from drafter.search.lattice import LATTICE_BEAM, best_lattice_trie
from drafter.search.product import best_product_trie
from drafter.search.static import static_tree
from drafter.tree.token_tree import TokenTree

_CANDIDATES = 64
"""Tokens a row that the exact search looks at (see `best_trie`)."""


@dataclass(frozen=True)
class CTCHeadConfig:
    """Shape of a CTC head.

    Args:
        hidden_size: d, of the base.
        vocab_size: V, of the base.
        num_frames: T.
        depth: U, tokens of a target in training and levels of a tree.
        module: `attention` reads the whole text; `linear` only the last hidden state, by Medusa's residual blocks.
        num_layers: Transformer layers of the attention module.
        num_heads: Attention heads; even width each.
        intermediate_size: Width of the gated MLP.
        label_context: How many of the last labels a frame knows: 0 is the paper's CTC, more the lattice.
        band: With a label context: frame `j` holds label `u` only for `u ≤ j < u + band`.
        joint_size: With a label context: inner width of the joint of frame and labels.
        joint_layers: With a label context: layers of the joint.
        rope_theta: Base of the rotary positions.
        blank_bias: Initial log-odds of the blank. Blanks start improbable and are learnt where they pay.
        loss: `prefix` weighs prefix probabilities by depth; `ctc` is the paper's, of the text
            itself whatever the teacher says; `ce` is cross-entropy, frame `u` for token `u`, without a blank: no CTC
            at all.
        depth_decay: Weight of a label, relative to the one before, in the prefix loss and cross-entropy.

    Raises:
        ValueError: Sizes that do not fit together.
    """

    hidden_size: int
    vocab_size: int
    num_frames: int = 8
    depth: int = 6
    module: Literal["attention", "linear"] = "attention"
    num_layers: int = 1
    num_heads: int = 4
    intermediate_size: int = 704
    label_context: int = 0
    band: int = 2
    joint_size: int = 256
    joint_layers: int = 1
    rope_theta: float = 10_000.0
    blank_bias: float = -3.0
    loss: Literal["prefix", "ctc", "ce"] = "prefix"
    depth_decay: float = 0.8

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "vocab_size", "num_frames", "depth", "num_layers", "num_heads", "intermediate_size")
        check_sizes(self, *sizes, "band", "joint_size", "joint_layers")
        if self.module == "attention" and self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.num_heads} heads of even width")
        if self.depth > self.num_frames:
            raise ValueError(f"{self.num_frames} frames cannot say {self.depth} tokens: depth is at most num_frames")
        if self.loss == "ce" and self.depth < self.num_frames:
            raise ValueError(f"without a blank each of {self.num_frames} frames says a token: depth must be num_frames")
        if self.label_context < 0:
            raise ValueError(f"label_context must be at least 0, not {self.label_context}")
        if self.label_context and self.loss != "prefix":
            raise ValueError("with a label context the loss must be 'prefix'")


class CTCHead(FrameHead):
    """The draft module: everything that trains. The base's embedding and LM head are borrowed, not saved."""

    algorithm = "ctc"
    config_class = CTCHeadConfig
    config: CTCHeadConfig

    def __init__(self, config: CTCHeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.recent_tokens = max(1, config.label_context)
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
            )
        self.norm = nn.LayerNorm(width)
        if config.loss != "ce":
            self.blank = nn.Linear(width, 1)
            nn.init.zeros_(self.blank.weight)
            nn.init.constant_(self.blank.bias, config.blank_bias)
        if config.label_context:
            # Without weights of its own: what is known of the labels then needs no gradient.
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

    def forward(self, base: BaseModel, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        """CTC, prefix, lattice or cross-entropy loss, as the configuration says; see `DraftHead.forward`."""
        config = self.config
        real = batch.lengths > 0
        count = self.frames_for(config.depth + 1, "exact")
        states = self.module(base.embed(batch.tokens), hidden, batch.anchors, count)[real]
        targets, lengths, labels = batch.targets[real], batch.lengths[real], labels[real]
        if config.label_context:
            known = last_tokens(batch.tokens, batch.anchors, config.label_context)[real]
            return self._lattice_loss(base, states, torch.cat([known, targets], 1), lengths, labels)
        states = self.norm(states)
        if config.loss == "ce":
            log_probs = chosen_log_probs(base, states, labels.tokens)
            return cross_entropy(log_probs, labels, lengths, config.depth_decay)
        # Each row's own small alphabet: its targets and labels, by the first place of each among them, and the blank.
        names = torch.cat([targets, labels.tokens.flatten(1)], 1)
        alphabet = (names[:, :, None] == names[:, None]).int().argmax(2)
        blank, said = self.blank_log_probs(states)
        chosen = chosen_log_probs(base, states, names[:, None].expand(-1, states.shape[1], -1))
        log_probs = torch.cat([chosen + said, blank], 2)
        targets, choices = alphabet.split([targets.shape[1], labels.tokens.shape[1] * labels.tokens.shape[2]], 1)
        if config.loss == "ctc":
            return ctc_loss(log_probs, targets, lengths)[0]
        labels = Labels(choices.view(labels.tokens.shape), labels.probs)
        return prefix_loss(log_probs, targets, lengths, config.depth_decay, labels)

    def _lattice_loss(self, base: BaseModel, states: Tensor, text: Tensor, lengths: Tensor, labels: Labels) -> LossSum:
        """The prefix loss of frames `[N, F, d]` that know the last labels.

        Args:
            text: `[N, c + U]` the tokens around the anchor: `c` up to the pending one, then the targets.
            labels: `[N, U, K]`.
        """
        config = self.config
        depth, frames = config.depth, states.shape[1]
        frame = torch.arange(depth, device=text.device)[:, None] + torch.arange(config.band, device=text.device)
        frame = frame.clamp_max(frames - 1)
        known = self.label_norm(base.embed(text)).unfold(1, config.label_context, 1)[:, :depth]
        joint = self.joint_frames(states)[:, frame] + self.joint_labels(known.transpose(2, 3).flatten(2))[:, :, None]
        states = self.joint(states[:, frame], joint)
        states = self.norm(states)
        blank, said = self.blank_log_probs(states)
        tokens = torch.cat([text[:, config.label_context :, None], labels.tokens], 2)
        chosen = chosen_log_probs(base, states, tokens[:, :, None].expand(-1, -1, config.band, -1)) + said
        return lattice_prefix_loss(
            chosen[..., 0],
            blank[..., 0],
            lengths,
            frames,
            config.depth_decay,
            (chosen[..., 1:], labels.probs),
        )

    def token_log_probs(self, states: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """`[..., V]` float32 log-probabilities of the tokens, of frame states `[..., d]`, blanks apart."""
        return lm_head(self.norm(states)).float().log_softmax(-1)

    def log_probs(self, states: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """`[..., V + 1]` float32 log-probabilities, blank last, of frame states `[..., d]`."""
        blank, said = self.blank_log_probs(self.norm(states))
        return torch.cat([self.token_log_probs(states, lm_head) + said, blank], -1)

    def blank_log_probs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities `[..., 1]` of the blank and of all tokens together, of normalised states `[..., d]`.

        The blank's output is a log-odds: `p(ε) = σ(z)`, and the tokens share what is left. So its bias means the
        same whatever the vocabulary.
        """
        blank = self.blank(states).float()
        return F.logsigmoid(blank), F.logsigmoid(-blank)

    def joint(self, states: Tensor, joint: Tensor) -> Tensor:
        """Frame states that know the last labels: `s_j + MLP[s_j; e(y)]`, and residual layers after it.

        Args:
            states: `[..., d]` frame states.
            joint: `[..., joint_size]` the joint's first layer, before its activation: what `joint_frames` makes of the
                states plus what `joint_labels` makes of the labels' normalised embeddings, newest last.

        Returns:
            `[..., d]`.
        """
        states = states + self.joint_out(F.silu(joint))
        for layer in self.joint_layers:
            states = states + layer(states)
        return states

    def search(self, states: Tensor, recent: Tensor, base: BaseModel, size: int, tree: Tree) -> TokenTree:
        """The best trie of the frames, or the published tree; see `FrameHead.search`."""
        config, pending = self.config, recent[:, -1]
        if config.label_context:
            return self._search_lattice(partial(FrameLattice, self, base), states, recent, size, 0.0)
        if config.loss == "ce":
            log_probs = self.token_log_probs(states, base.lm_head)
            if tree == "static":
                return static_tree(log_probs, pending, config.depth, size, blank=False)
            return best_product_trie(log_probs, pending, size)
        log_probs = self.log_probs(states, base.lm_head)
        if tree == "static":
            return static_tree(log_probs, pending, config.depth, size)
        return best_trie(log_probs, pending, config.depth, size, _CANDIDATES)

    def prepared_search(self, base: BaseModel, tree: Tree) -> Search:
        """See `FrameHead.prepared_search`."""
        if not self.config.label_context or devices.is_asynchronous(base.device):
            return super().prepared_search(base, tree)
        return partial(self._search_lattice, PreparedLattices(self, base))

    def _search_lattice(
        self, lattices: Callable[[Tensor, Tensor], LabelModel], states: Tensor, recent: Tensor, size: int, least: float
    ) -> TokenTree:
        config, frames = self.config, states.shape[1]
        lattice = lattices(states, recent)
        return best_lattice_trie(lattice, recent[:, -1], frames, config.band, config.depth, size, LATTICE_BEAM, least)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        """Those within the band of a level; all of them where any may say any label. See `FrameHead.frames_for`."""
        config = self.config
        levels = min(config.depth, size - 1)
        if config.label_context:
            return min(levels + config.band - 1, config.num_frames)
        return levels if config.loss == "ce" and tree == "exact" else None

    def refuse_tree(self, tree: Tree) -> None:
        """Raise `ValueError` for a tree that these frames do not have."""
        if tree == "static" and self.config.label_context:
            raise ValueError("the static tree needs frames that do not depend on labels: label_context 0")
