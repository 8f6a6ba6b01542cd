"""The lattice search of a CTC head on a CPU: our own C++ code, one call a step.

It finds the trees of `search.lattice`, and leaves out what cannot be in them: prefixes that no tree has room for, and
frames that a prefix hardly ever reaches. What labels add to the joint network is looked up.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from drafter.base.causal_lm import BaseModel
from drafter.heads.ctc.ctc_frames import CTCFrames
from drafter.native.library import PackedWeights, UnsuitableError, library
from drafter.native.structures import JointLayerStruct, JointStruct, LabelTableStruct, SearchStruct
from drafter.tree.token_tree import TokenTree

MOST_ENTRIES = 1 << 25
"""Numbers of the largest table of label terms, which then takes 128 MiB."""


class NativeSearch:
    """Searches with a head whose weights no longer change.

    Args:
        head: A head with a label context, in fp32 on a CPU.
        base: Lends its embedding and LM head.
        beam: Prefixes kept at each depth.

    Raises:
        BuildError: The library cannot be compiled here.
        UnsuitableError: Its weights are elsewhere, or its table of label terms would be too large.
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
        # A text may have tokens that are never drafted, so a table of the drafted ones does not have all of its own.
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
        """Return what each token adds at each place of the last labels, `[c, N, joint_size]`."""
        labels = self._head.label_norm(self._base.embed(tokens))
        return torch.stack([labels.float() @ weights.T for weights in self._label_weights.unbind(1)])
