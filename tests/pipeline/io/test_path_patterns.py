"""What patterns match, and where they begin."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.io.files import is_pattern, pattern_base, pattern_regex


@given(st.text("ab/.", max_size=8))
def test_patterns_without_wildcards_match_only_themselves(path: str) -> None:
    assert pattern_regex(path).fullmatch(path)
    assert not pattern_regex(path).fullmatch(path + "a")


@pytest.mark.parametrize(
    ("uri", "base"),
    [
        ("s3://bucket/in/*.jsonl?region=eu", "s3://bucket/in?region=eu"),
        ("s3://bucket/in?region=eu", None),
        ("in/a?.jsonl", "in"),
    ],
)
def test_a_query_is_no_pattern(uri: str, base: Any) -> None:
    assert is_pattern(uri) is (base is not None)
    if base is not None:
        assert pattern_base(uri) == base
