"""The native joint network emits what the head's own modules do."""

from __future__ import annotations

import pytest
import torch

from drafter.base.causal_lm import BaseModel
from drafter.heads.ctc.ctc_frames import CTCFrames
from drafter.heads.ctc.frame_lattice import FrameLattice
from drafter.heads.ctc.prepared_lattice import PreparedLattices
from tests.support.heads import make_head


@pytest.mark.parametrize("kind", ["context 1", "context 2", "context 2, in part"])
@torch.no_grad()
def test_the_same_emissions(tiny_base: BaseModel, kind: str) -> None:
    head = make_head(tiny_base, kind)
    assert isinstance(head, CTCFrames)
    recent = torch.randint(97, (3, head.config.label_context))
    states = torch.randn(3, head.config.num_frames, tiny_base.hidden_size)
    plain, prepared = FrameLattice(head, tiny_base, states, recent), PreparedLattices(head, tiny_base)(states, recent)
    rows, drafted = torch.tensor([2, 0, 0, 1, 2]), torch.tensor([5, 6, 7, 8, 9])
    for frame in range(2):
        expected = plain.score(frame, frame + 1, rows, plain.extend(plain.start()[rows], drafted))
        given = prepared.score(frame, frame + 1, rows, prepared.extend(prepared.start()[rows], drafted))
        for ours, theirs in zip(given, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
