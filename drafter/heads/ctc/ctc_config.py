"""Configuration of a CTC head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafter.heads.contract import check_draft_vocab, check_sizes


@dataclass(frozen=True)
class CTCHeadConfig:
    """Shape and loss of a CTC head.

    Args:
        hidden_size: d, width of the base's hidden states.
        vocab_size: V, size of the base's vocabulary.
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
