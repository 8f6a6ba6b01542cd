"""Every family that transformers has is decoded as `generate` does, or refused by name: see `docs/families.md`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from tests.support.families import FAMILIES, try_family
from tests.support.marks import slow_but

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def outcomes() -> dict[str, str]:
    row = re.compile(r"^\| (equal|refused|differs|not built) \| .*\| (`.*`) \|$", re.MULTILINE)
    rows = row.findall(PAGE.read_text(encoding="utf-8"))
    return {family: outcome for outcome, families in rows for family in re.findall("`([^`]+)`", families)}


def test_the_page_has_every_family() -> None:
    release = re.search(r"of transformers ([\d.]+),", PAGE.read_text(encoding="utf-8"))
    assert release is not None
    if release[1] == transformers.__version__:
        assert outcomes().keys() == set(FAMILIES)
    else:
        assert outcomes().keys() <= set(FAMILIES)


@pytest.mark.parametrize("family", slow_but(["llama", "gpt_neo", "gemma3n_text"], FAMILIES))
def test_a_family_is_decoded_as_generate_does_or_refused(family: str) -> None:
    tried = try_family(family)
    assert tried.outcome == outcomes().get(family, tried.outcome), tried.reason  # the page may be of another release
    assert tried.outcome != "differs"
