from __future__ import annotations

import re
from pathlib import Path

import pytest

from drafter.drafters import names, registry
from drafter.drafters.registry import load_drafter, shipped_head
from drafter.errors import LoadError
from drafter.heads.checkpoint import new_head, save_head
from drafter.heads.contract import Provenance
from drafter.target_model.model import BaseModel


@pytest.fixture
def head_of_tiny_base(tiny_base: BaseModel, tmp_path: Path) -> Path:
    """A head's folder, in a folder of heads."""
    head = new_head("ctc", tiny_base, {"num_heads": 2})
    head.provenance = Provenance("org/tiny", tiny_base.fingerprint)
    save_head(head, tmp_path / "tiny")
    return tmp_path / "tiny"


def test_auto_chooses_among_the_head_that_ships_for_a_base_and_what_needs_none(
    tiny_base: BaseModel, head_of_tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shipped_head(tiny_base) is None
    assert list(load_drafter("auto", tiny_base, 8).members) == ["cacheback", "memory"]
    monkeypatch.setattr(registry, "OTHER_HEADS", head_of_tiny_base.parent)
    assert shipped_head(tiny_base) == head_of_tiny_base
    assert list(load_drafter("auto", tiny_base, 8).members) == ["head", "cacheback", "memory", "head+cacheback"]


def test_a_slip_in_a_name_is_told_from_another_name(tiny_base: BaseModel) -> None:
    for name, hint in (
        ("ngarm", "did you mean ngram?"),
        ("cct", "did you mean ctc?"),
        ("exi:2", "did you mean exit:2?"),
    ):
        with pytest.raises(LoadError, match=f"no drafter '{name}': {re.escape(hint)}"):
            load_drafter(name, tiny_base, 8)
    with pytest.raises(LoadError, match="no drafter 'ctcs': did you mean ctc"):
        names.check_name("ctcs")
    with pytest.raises(LoadError, match="no drafter 'xyz': use auto, none, cacheback"):
        names.check_name("xyz")


def test_candidates_are_named(tiny_base: BaseModel) -> None:
    assert list(load_drafter("auto:cacheback+ngram,memory", tiny_base, 8).members) == ["cacheback+ngram", "memory"]
    for name, message in (
        ("auto:ngram,nothing", "no drafter 'nothing'"),
        ("auto:ngram,", "name different drafters"),
        ("auto:ngram,ngram", "name different drafters"),
        ("memory+auto:ngram,cacheback", "cannot be part of another"),
        ("ngram+auto", "cannot be part of another"),
    ):
        with pytest.raises(LoadError, match=message):
            load_drafter(name, tiny_base, 8)


def test_a_head_of_another_base_is_not_taken(
    tiny_base: BaseModel, head_of_tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = head_of_tiny_base / "config.json"
    config.write_text(config.read_text().replace(tiny_base.fingerprint, "v2-0123456789abcdef"))
    monkeypatch.setattr(registry, "OTHER_HEADS", head_of_tiny_base.parent)
    assert shipped_head(tiny_base) is None
