"""The layers of a CTC head: from the text so far to the distributions of `T` frames.

A draft module computes the frame states. The base's frozen LM head gives each frame's tokens, and an output of the
head's own gives the blank. With a label context, a small joint network tells a frame which labels were emitted last
(the stateless transducer of speech recognition: Ghodsi et al. 2020).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.base.causal_lm import BaseModel
from drafter.heads.ctc.ctc_config import CTCHeadConfig
from drafter.heads.frame_head import FrameHead
from drafter.heads.modules.attention import AttentionModule
from drafter.heads.modules.residual import ResidualBlocks


class CTCFrames(FrameHead):
    """Everything of a CTC head that is trained. The base's embedding and LM head are borrowed and not saved."""

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
        """Return float32 log-probabilities of the tokens given that the frame emits one, `[..., V]`.

        Args:
            states: `[..., d]` frame states.
            lm_head: From normalised states to logits.
        """
        return lm_head(self.norm(states)).float().log_softmax(-1)

    def log_probs(self, states: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return float32 log-probabilities of all symbols, `[..., V + 1]`, the blank last.

        Args:
            states: `[..., d]` frame states.
            lm_head: From normalised states to logits.
        """
        blank, emit = self.blank_log_probs(self.norm(states))
        return torch.cat([self.token_log_probs(states, lm_head) + emit, blank], -1)

    def blank_log_probs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `[..., 1]` of the blank and of all tokens together.

        The blank's output `z` is a log-odds: `p(ε) = σ(z)`, and the tokens share the rest. So its bias has the same
        meaning for every vocabulary.

        Args:
            states: `[..., d]` normalised frame states.
        """
        blank = self.blank(states).float()
        return F.logsigmoid(blank), F.logsigmoid(-blank)

    def label_terms(self, base: BaseModel, labels: Tensor) -> Tensor:
        """Return what labels add to the first layer of the joint network, `[..., joint_size]`.

        Args:
            base: Lends its embedding.
            labels: `[..., c]` the last labels, the newest last.
        """
        return self.joint_labels(self.label_norm(base.embed(labels)).flatten(-2))  # type: ignore[no-any-return]

    def joint(self, states: Tensor, terms: Tensor) -> Tensor:
        """Return frame states that know the last labels, `[..., d]`: `s_j + MLP[s_j; e(y)]` and residual layers.

        Args:
            states: `[..., d]` frame states.
            terms: `[..., joint_size]` first layer of the joint network before its activation: `joint_frames` of the
                states plus `label_terms` of the labels.
        """
        return self.joint_activations(states, terms)[0]

    def joint_activations(self, states: Tensor, terms: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return what `joint` returns, and the activations of each layer of the joint network.

        Side by side they are `[..., R]`: the states have moved by `joint_spans` times them.
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
        """`[d, R]` output weights of all layers of the joint network, side by side."""
        spans = [self.joint_out.weight]
        for layer in self.joint_layers:
            *_, out = layer.children()
            assert isinstance(out.weight, Tensor)
            spans.append(out.weight)
        return torch.cat(spans, 1)
