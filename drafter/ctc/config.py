"""Settings of a CTC head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafter.heads.config import HeadConfig, check_even_heads, check_sizes


@dataclass(frozen=True)
class CTCHeadConfig(HeadConfig):
    """Shape and loss of a CTC head. The joint network and `band` are for a label context only.

    Args:
        num_frames: T, number of frames.
        module: `attention` reads the whole text, `linear` the last hidden state, through Medusa's residual blocks.
        causal: Whether a frame of the attention module attends to no later frame.
        num_layers: Transformer layers of the attention module.
        num_heads: Attention heads of a layer; each has an even width.
        intermediate_size: Inner width of a layer's gated MLP.
        label_context: Number of last labels that a frame knows. With 0 the frames are independent, as in the paper;
            with more they form a lattice.
        band: Frame `j` may hold label `u` only for `u ≤ j < u + band`.
        joint_size: Inner width of the joint network of frame and labels.
        joint_layers: Number of layers of the joint network.
        rope_theta: Base of the rotary positions.
        blank_bias: Initial log-odds of the blank. Training makes blanks likely where they pay.
        loss: `prefix` weights prefix probabilities by depth. `ctc` is the paper's loss; its labels are the text itself,
            whatever the teacher finds likely. `ce` is cross-entropy of frame `u` on token `u`: no blank and no CTC.
    """

    num_frames: int = 8
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "num_frames", "num_layers", "num_heads", "intermediate_size")
        check_sizes(self, "band", "joint_size", "joint_layers", "rope_theta")
        if self.module == "attention":
            check_even_heads(self)
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
