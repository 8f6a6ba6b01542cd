"""Label models of a CTC head: the distributions of its frames after a path, and the native lattice search."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafter.ctc.frames import CTCFrames
from drafter.native.build import (
    JointLayerStruct,
    JointStruct,
    LabelTableStruct,
    PackedWeights,
    SearchStruct,
    UnsuitableError,
    library,
)
from drafter.target.model import BaseModel
from drafter.tree.token_tree import TokenTree


class FrameLattice:
    """`LabelModel` that runs the head as it is. The state of a path is its last `c` tokens, as ids of the target model.

    Args:
        states: `[B, F, d]` frame states.
        recent: `[B, c]` last tokens of each text, the pending token last.
    """

    def __init__(self, head: CTCFrames, base: BaseModel, states: Tensor, recent: Tensor) -> None:
        self._head, self._base, self._recent = head, base, recent
        self._states = states
        self._frame_terms: Tensor = head.joint_frames(states)

    def start(self) -> Tensor:
        return self._recent

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        return shifted(state, self._head.base_tokens(tokens))

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        head = self._head
        states = head.norm(head.joint(self._states[rows, first:stop], self._terms(first, stop, rows, state)))
        shares = head.output(self._base).lm_head(states).softmax(-1, dtype=torch.float32)
        return shares, head.blank(states)[..., 0].float().sigmoid()

    def _terms(self, first: int, stop: int, rows: Tensor, state: Tensor) -> Tensor:
        """Return the pre-activation of the joint network's first layer, `[M, stop - first, joint_size]`."""
        return self._frame_terms[rows, first:stop] + self._head.label_terms(self._base, state)[:, None]


def shifted(state: Tensor, tokens: Tensor) -> Tensor:
    """Append `tokens` `[M]` to the last labels `[M, c]` and drop the oldest."""
    return torch.cat([state[:, 1:], tokens[:, None]], 1)


_SMALLER = 2
"""The factor must be this many times smaller than the LM head, to make up for computing the frames' logits."""


@dataclass(frozen=True)
class LabelFactor:
    """The LM head applied to the joint network's output weights: `[R + 1, V]`, `(W·c(O))ᵀ`, then `W·β`."""

    logits: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, head: CTCFrames, base: BaseModel) -> LabelFactor:
        """Compute the factor from the present weights."""
        spans = _centred(head, head.joint_spans.T)
        return cls(head.output(base).lm_head(torch.cat([spans, head.norm.bias[None]])))


def is_factored(head: CTCFrames, base: BaseModel) -> bool:
    """Return whether the logits can be factored, and a level then reads less."""
    spans = head.joint_spans
    return head.output(base).lm_head_bias is None and _SMALLER * (spans.shape[1] + 1) <= len(spans)


class FactoredLattice(FrameLattice):
    """`FrameLattice` up to rounding, but reads the LM head, which has no bias, once per draft, not once per tree level.

    The search must extend all paths of a level: they come ordered by row, the same number for each.
    """

    def __init__(self, head: CTCFrames, base: BaseModel, states: Tensor, recent: Tensor, factor: LabelFactor) -> None:
        super().__init__(head, base, states, recent)
        self._factor = factor
        self._frame_logits = head.output(base).lm_head(_centred(head, states))

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        head, frames = self._head, stop - first
        told, activations = head.joint_activations(
            self._states[rows, first:stop], self._terms(first, stop, rows, state)
        )
        scale = (told.float().var(-1, correction=0, keepdim=True) + head.norm.eps).rsqrt().to(told)
        known = torch.cat([*(layer * scale for layer in activations), torch.ones_like(scale)], -1)
        # A row's paths share its frames: `own` selects the logits of each path's frame.
        own = torch.eye(frames, device=scale.device, dtype=scale.dtype) * scale
        logits = (known.flatten(0, 1) @ self._factor.logits).unflatten(0, (len(self._states), -1))
        logits.baddbmm_(own.view(*logits.shape[:2], frames), self._frame_logits[:, first:stop])
        shares = logits.view(len(rows), frames, -1).softmax(-1, dtype=torch.float32)
        return shares, head.blank(head.norm(told))[..., 0].float().sigmoid()


def _centred(head: CTCFrames, states: Tensor) -> Tensor:
    """`c(x)` of states `[..., d]`."""
    return head.norm.weight * (states - states.mean(-1, keepdim=True))


MOST_ENTRIES = 1 << 25
"""Numbers in the largest table of label terms, 128 MiB."""


class NativeSearch:
    """Lattice search in the native library, one call per step, for a head with frozen weights.

    Args:
        head: A head with a label context, in fp32 on a CPU.
        beam: Prefixes kept at each depth.

    Raises:
        BuildError: The library cannot be compiled here.
        UnsuitableError: The weights are on another device, or the table of label terms would be too large.
    """

    @torch.no_grad()
    def __init__(self, head: CTCFrames, base: BaseModel, beam: int) -> None:
        config, output = head.config, head.output(base)
        self._head, self._base, self._beam = head, base, beam
        self._tokens = len(output.lm_head_weight)
        entries = config.label_context * self._tokens * config.joint_size
        if entries > MOST_ENTRIES:
            raise UnsuitableError(
                f"its table of label terms would have {entries} numbers: train it with a smaller label_context, "
                "joint_size or draft_vocab_size"
            )
        self._weights = weights = PackedWeights()
        layers = (JointLayerStruct * len(head.joint_layers))()
        for struct, layer in zip(layers, head.joint_layers, strict=True):
            norm, inner, _, out = layer.children()
            assert isinstance(norm, nn.LayerNorm)
            assert isinstance(inner, nn.Linear)
            assert isinstance(out, nn.Linear)
            struct.norm_weight, struct.norm_bias = weights.address(norm.weight), weights.address(norm.bias)
            struct.inner, struct.out = weights.matrix(inner.weight, inner.bias), weights.matrix(out.weight)
        self._joint = JointStruct(
            frames=weights.matrix(head.joint_frames.weight, head.joint_frames.bias),
            out=weights.matrix(head.joint_out.weight),
            layers=layers,
            norm_weight=weights.address(head.norm.weight),
            norm_bias=weights.address(head.norm.bias),
            blank_weight=weights.address(head.blank.weight),
            blank_bias=weights.address(head.blank.bias),
            head=weights.matrix(output.lm_head_weight, output.lm_head_bias),
            layer_count=len(layers),
            terms=config.joint_size,
            hidden=config.hidden_size,
        )
        # [joint_size, c, d]
        self._label_weights = head.joint_labels.weight.unflatten(1, (config.label_context, -1))
        self._table = self._terms(head.base_tokens(torch.arange(self._tokens)))

    def __call__(self, states: Tensor, recent: Tensor, size: int, least: float) -> TokenTree:
        """Return trees `[B, size]` in draft ids; see `frame_head.Search`."""
        config = self._head.config
        rows, frames, _ = states.shape
        states, pending = states.contiguous(), recent[:, -1].contiguous()
        known = recent.flatten()
        # The table has only the draft vocabulary; a text may have other tokens.
        recent_terms = self._table[:, known] if self._head.vocabulary is None else self._terms(known)
        recent_terms = recent_terms.contiguous()
        tokens, parents, depths = (torch.empty(rows, size, dtype=torch.long) for _ in range(3))
        log_probs = torch.empty(rows, size, dtype=torch.float32)
        search = SearchStruct(
            labels=LabelTableStruct(
                self._table.data_ptr(), recent_terms.data_ptr(), config.label_context, self._tokens, len(known)
            ),
            states=states.data_ptr(),
            rows=rows,
            frames=frames,
            band=config.band,
            depth=config.depth,
            size=size,
            beam=self._beam,
            least=least,
            pending=pending.data_ptr(),
            tokens=tokens.data_ptr(),
            parents=parents.data_ptr(),
            depths=depths.data_ptr(),
            log_probs=log_probs.data_ptr(),
            threads=torch.get_num_threads(),
        )
        library().drafter_search(ctypes.byref(self._joint), ctypes.byref(search))
        return TokenTree(tokens, parents, depths, log_probs)

    def _terms(self, tokens: Tensor) -> Tensor:
        """Return each token's term at each position of the label context, `[c, N, joint_size]`."""
        labels = self._head.label_norm(self._base.embed(tokens))
        return torch.stack([labels.float() @ weights.T for weights in self._label_weights.unbind(1)])
