"""A CTC head's joint network, LM head and softmax on a CPU, in one call of the native library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from drafter.heads.ctc.ctc_frames import CTCFrames
from drafter.heads.draft_vocabulary import OutputLayer
from drafter.native.library import JointLayerStruct, JointStruct, PackedMatrix, ScoreStruct, library


class NativeJoint:
    """What a frame emits after each of several paths, from weights that no longer change.

    Args:
        head: A head with a label context, in fp32 on a CPU.
        output: Its LM head.

    Raises:
        BuildError: The library cannot be compiled here.
    """

    def __init__(self, head: CTCFrames, output: OutputLayer) -> None:
        library()
        self._kept: list[object] = []
        layers = (JointLayerStruct * len(head.joint_layers))()
        for struct, layer in zip(layers, head.joint_layers, strict=True):
            norm, inner, _, out = layer.children()
            struct.norm_weight, struct.norm_bias = self._address(norm.weight), self._address(norm.bias)
            struct.inner, struct.out = self._matrix(inner.weight, inner.bias), self._matrix(out.weight, None)
        self._struct = JointStruct(
            out=self._matrix(head.joint_out.weight, None),
            layers=layers,
            norm_weight=self._address(head.norm.weight),
            norm_bias=self._address(head.norm.bias),
            blank_weight=self._address(head.blank.weight),
            blank_bias=self._address(head.blank.bias),
            head=self._matrix(output.lm_head_weight, output.lm_head_bias),
            layer_count=len(layers),
            terms=head.config.joint_size,
            hidden=head.config.hidden_size,
        )
        self._tokens = len(output.lm_head_weight)

    def emissions(
        self, frame: int, states: Tensor, frame_terms: Tensor, rows: Tensor, label_terms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens' shares `[M, V]` and the blank's probability `[M]` of one frame after M paths.

        Args:
            frame: The frame, from 0.
            states: `[B, F, d]` frame states.
            frame_terms: `[B, F, joint_size]` what they add to the joint network's first layer.
            rows: `[M]` int64 row of each path.
            label_terms: `[M, joint_size]` what the paths' labels add.
        """
        count = len(rows)
        states, frame_terms = states.contiguous(), frame_terms.contiguous()
        rows, label_terms = rows.contiguous(), label_terms.contiguous()
        shares, blanks = torch.empty(count, self._tokens), torch.empty(count)
        asked = ScoreStruct(
            frame_states=states[0, frame].data_ptr(),
            frame_terms=frame_terms[0, frame].data_ptr(),
            state_stride=states.stride(0),
            term_stride=frame_terms.stride(0),
            rows=rows.data_ptr(),
            label_terms=label_terms.data_ptr(),
            count=count,
            shares=shares.data_ptr(),
            blanks=blanks.data_ptr(),
            threads=torch.get_num_threads(),
        )
        library().drafter_score(ctypes.byref(self._struct), ctypes.byref(asked))
        return shares, blanks

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> object:
        packed = PackedMatrix(weight, bias)
        self._kept.append(packed)
        return packed.struct()

    def _address(self, parameter: Tensor | nn.Parameter) -> int:
        tensor = parameter.detach().contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()
