"""CTC head (Wen, Gui, Feng 2024, arXiv 2412.00061): one forward drafts a whole tree.

Without a label context the frames are independent and trees come from CTC prefix search; with one, from a lattice
search.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import Tensor

from drafter import devices
from drafter.ctc.frames import CTCFrames, CTCHeadConfig, FrameLattice, NativeSearch, is_factored, label_factor
from drafter.ctc.lattice import LATTICE_BEAM, best_lattice_trie
from drafter.ctc.losses import ctc_loss, lattice_prefix_loss, prefix_loss
from drafter.ctc.prefix_search import best_trie, static_tree
from drafter.heads.config import Tree
from drafter.heads.frame_head import Search, last_tokens
from drafter.heads.losses import DraftBatch, Labels, LossSum, chosen_log_probs, cross_entropy
from drafter.native.build import BuildError, UnsuitableError
from drafter.target.model import BaseModel
from drafter.tree.token_tree import TokenTree, best_product_trie

_log = logging.getLogger(__name__)

_CANDIDATES = 64
"""Tokens per row that the prefix search considers; see `best_trie`."""


class CTCHead(CTCFrames):
    """Losses and searches over the frames."""

    algorithm = "ctc"
    config_class = CTCHeadConfig
    _factor: Tensor | None = None
    """Derived from the weights for the search in decoding."""

    def forward(self, base: BaseModel, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        """Return the loss that the configuration names; see `DraftHead.forward`."""
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
        self, base: BaseModel, states: Tensor, text: Tensor, targets: Tensor, lengths: Tensor, labels: Labels
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
        return lattice_prefix_loss(chosen[..., 0], blank[..., 0], lengths, frames, config.depth_decay, choices)

    def search(self, states: Tensor, recent: Tensor, base: BaseModel, size: int, tree: Tree) -> TokenTree:
        config, pending = self.config, recent[:, -1]
        if config.label_context:
            return self._search_lattice(states, recent, size, 0.0, base)
        blank = config.loss != "ce"
        log_probs = (self.log_probs if blank else self.token_log_probs)(states, self.output(base).lm_head)
        if tree == "static":
            return static_tree(log_probs, pending, config.depth, size, blank=blank)
        if blank:
            return best_trie(log_probs, pending, config.depth, size, _CANDIDATES)
        return best_product_trie(log_probs, pending, size)

    def prepared_search(self, base: BaseModel, tree: Tree) -> Search:
        if not self.config.label_context:
            return super().prepared_search(base, tree)
        if not devices.is_asynchronous(base.device) and base.dtype == torch.float32:
            try:
                return NativeSearch(self, base, LATTICE_BEAM)
            except (BuildError, UnsuitableError) as reason:
                _log.warning("the CTC head drafts without the native library, which is slower: %s", reason)
        self.prepack_search()
        # On a CPU improbable paths are pruned, so the LM head is read for few and a factor does not pay.
        if devices.is_asynchronous(base.device) and is_factored(self, base):
            self._factor = label_factor(self, base)
        return partial(self._search_lattice, base=base, factor=self._factor)

    def weights_changed(self, base: BaseModel) -> None:
        if self._factor is not None:
            self._factor.copy_(label_factor(self, base))

    def _search_lattice(
        self,
        states: Tensor,
        recent: Tensor,
        size: int,
        least: float,
        base: BaseModel,
        factor: Tensor | None = None,
    ) -> TokenTree:
        model = FrameLattice(self, base, states, recent, factor)
        band, depth = self.config.band, self.config.depth
        return best_lattice_trie(model, recent[:, -1], states.shape[1], band, depth, size, LATTICE_BEAM, least)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        config = self.config
        levels = min(config.depth, size - 1)
        if config.label_context:
            return min(levels + config.band - 1, config.num_frames)
        return levels if config.loss == "ce" and tree == "exact" else None
