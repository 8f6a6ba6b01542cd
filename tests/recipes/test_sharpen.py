from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter.ctc.head import CTCHead
from drafter.heads.checkpoint import load_head, save_head
from drafter.heads.contract import Provenance
from drafter.target_model.model import BaseModel
from recipes.sharpen import sharpen
from tests.support.heads import make_head


def test_tokens_are_surer_and_the_blank_is_as_likely_as_before(tiny_base: BaseModel, tmp_path: Path) -> None:
    head = make_head(tiny_base, "context 2")
    assert isinstance(head, CTCHead)
    with torch.no_grad():
        head.blank.weight.normal_(std=0.1)
        head.norm.bias.normal_(std=0.1)
    head.provenance = Provenance("tiny", tiny_base.fingerprint, {"steps": 1})
    save_head(head, tmp_path)
    sharpen(tmp_path, 2.0)
    sharper = load_head(tmp_path, tiny_base)
    assert isinstance(sharper, CTCHead)
    states = torch.randn(3, 5, head.config.hidden_size)
    logits = tiny_base.lm_head(head.norm(states))
    torch.testing.assert_close(sharper.token_log_probs(states, tiny_base.lm_head), (2 * logits).log_softmax(-1))
    blanks = [one.blank_log_probs(one.norm(states))[0] for one in (head, sharper)]
    torch.testing.assert_close(*blanks)
    assert sharper.provenance is not None
    assert sharper.provenance.training == {"steps": 1, "sharpened": 2.0}
    with pytest.raises(ValueError, match=r"has been sharpened by 2\.0: begin with the trained head"):
        sharpen(tmp_path, 2.0)


def test_a_head_without_a_blank_is_refused(tiny_base: BaseModel, tmp_path: Path) -> None:
    head = make_head(tiny_base, "medusa")
    head.provenance = Provenance("tiny", tiny_base.fingerprint)
    save_head(head, tmp_path)
    with pytest.raises(ValueError, match="has no CTC head with a blank"):
        sharpen(tmp_path, 2.0)
