"""Configuration of a CTC head, and its layers: from frame states to the distributions of `T` frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.heads.attention import AttentionModule
from drafter.heads.contract import check_draft_vocab, check_sizes
from drafter.heads.frame_head import FrameHead, ResidualBlocks
from drafter.target.model import BaseModel


@dataclass(frozen=True)
class CTCHeadConfig:
    """Shape and loss of a CTC head.

    Args:
        hidden_size: d, width of the target model's hidden states.
        vocab_size: V, size of the target model's vocabulary.
        num_frames: T, number of frames.
        depth: U, number of target tokens in training and of levels of a tree.
        module: Draft module. `attention` reads the whole text; `linear` reads only the last hidden state, through
            Medusa's residual blocks.
        causal: Whether a frame of the attention module attends to no later frame.
        num_layers: Transformer layers of the attention module.
        num_heads: Attention heads of a layer; each has an even width.
        intermediate_size: Inner width of a layer's gated MLP.
        label_context: Number of last labels that a frame knows. With 0 the frames are independent, as in the paper;
            with more they form a lattice.
        band: With a label context, frame `j` may hold label `u` only for `u ≤ j < u + band`.
        joint_size: With a label context, inner width of the joint network of frame and labels.
        joint_layers: With a label context, number of layers of the joint network.
        rope_theta: Base of the rotary positions.
        blank_bias: Initial log-odds of the blank. Blanks start improbable, and training makes them likely where they
            pay.
        loss: `prefix` weights prefix probabilities by depth. `ctc` is the paper's loss; its labels are the text itself,
            whatever the teacher finds likely. `ce` is cross-entropy of frame `u` on token `u`: no blank and no CTC.
        depth_decay: Weight of a label relative to the label before it, in the prefix loss and in cross-entropy.
        draft_vocab_size: Number of tokens that may be drafted, the most frequent ones; None for all.

    Raises:
        ValueError: The sizes do not fit together.
    """

    hidden_size: int
    vocab_size: int
    num_frames: int = 8
    depth: int = 6
    module: Literal["attention", "linear"] = "attention"
    causal: bool = False
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
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "vocab_size", "num_frames", "depth", "num_layers", "num_heads", "intermediate_size")
        check_sizes(self, *sizes, "band", "joint_size", "joint_layers", "rope_theta")
        check_draft_vocab(self)
        if self.module == "attention" and self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.num_heads} heads of even width")
        if self.depth > self.num_frames:
            raise ValueError(f"{self.num_frames} frames cannot say {self.depth} tokens: depth is at most num_frames")
        if self.loss == "ce" and self.depth < self.num_frames:
            raise ValueError(f"without a blank each of {self.num_frames} frames says a token: depth must be num_frames")
        if self.label_context < 0:
            raise ValueError(f"label_context must be at least 0, not {self.label_context}")
        if self.label_context and self.band > self.num_frames:
            raise ValueError(f"band must be at most num_frames, {self.num_frames}, not {self.band}")
        if self.label_context and self.loss != "prefix":
            raise ValueError("with a label context the loss must be 'prefix'")


class CTCFrames(FrameHead):
    """All trained layers of a CTC head. The target model's embedding and LM head are borrowed and not saved."""

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
        """Return float32 log-probabilities `[..., V]` of the tokens given that the frame, of `states` `[..., d]`, emits
        one.
        """
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

    def label_terms(self, base: BaseModel, labels: Tensor) -> Tensor:
        """Return the term of the last labels `[..., c]`, newest last, in the joint network's first layer, `[...,
        joint_size]`.
        """
        return self.joint_labels(self.label_norm(base.embed(labels)).flatten(-2))  # type: ignore[no-any-return]

    def joint(self, states: Tensor, terms: Tensor) -> Tensor:
        """Return frame states with a label context, `[..., d]`: `s_j + MLP[s_j; e(y)]`, then residual layers.

        `terms` `[..., joint_size]` is the first layer's pre-activation: `joint_frames` of the states plus
        `label_terms`.
        """
        return self.joint_activations(states, terms)[0]

    def joint_activations(self, states: Tensor, terms: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the result of `joint` and the activations of each layer.

        Concatenated they are `[..., R]`: `joint` adds `joint_spans` times them to the states.
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
