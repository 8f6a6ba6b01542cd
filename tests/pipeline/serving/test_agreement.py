"""Whose requests may be learnt from: those of clients who agreed, and nobody else's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipeline.errors import InputError
from pipeline.serving.config import ServingLearning
from pipeline.serving.keys import Agreement, read_agreement


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


KNOWN = (digest("key-a"), digest("key-b"))


def learning(agreed: str) -> ServingLearning:
    return ServingLearning(enabled=True, agreed=agreed, folder="head")


@pytest.mark.parametrize("header", [None, "", "Bearer ", "Bearer key-a", "Basic key-a"])
def test_without_a_word_nobody_has_agreed(header: str | None) -> None:
    assert not Agreement().covers(header)
    assert not read_agreement(ServingLearning(), KNOWN).covers(header)
    assert not read_agreement(ServingLearning(agreed="all"), KNOWN).covers(header)  # no head learns


@pytest.mark.parametrize("header", [None, "Bearer key-b"])
def test_all_are_all(header: str | None) -> None:
    assert read_agreement(learning("all"), ()).covers(header)


def test_those_in_a_file_have_agreed_and_others_have_not(tmp_path: Path) -> None:
    file = tmp_path / "agreed"
    file.write_text("# by contract\nkey-a # Ann\n\n")
    agreement = read_agreement(learning(str(file)), KNOWN)
    assert agreement.covers("Bearer key-a")
    for other in (None, "", "Bearer", "Bearer key-b", "Bearer key-c", "Basic key-a", "key-a"):
        assert not agreement.covers(other), other
    assert "key" not in repr(agreement.digests)


@pytest.mark.parametrize(
    ("text", "known", "message"),
    [
        (None, KNOWN, "agreed cannot be read: No such file or directory"),
        ("# nobody\n", KNOWN, "agreed has no key: write one on a line"),
        ("key-a\nkey-c\n", KNOWN, "agreed: key 2 is none of the endpoint's"),
        ("key-a\n", (), "the endpoint has none, and cannot tell clients apart"),
    ],
)
def test_an_agreement_that_cannot_be_kept_is_refused(
    text: str | None, known: tuple[bytes, ...], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "agreed"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_agreement(learning(str(file)), known)
