"""Texts that no tokeniser takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drafter.errors import RequestError
from drafter.half_characters import parsed_json, refuse_half_characters


@pytest.mark.parametrize("value", ["a\ud83d", [{"a": ["\udc00"]}], {"\ud83d": 1}])
def test_half_a_character_is_found_at_any_depth_and_in_json(value: Any) -> None:
    with pytest.raises(RequestError, match="the tools has half a character"):
        refuse_half_characters(value, "the tools")
    with pytest.raises(RequestError, match="it has half a character"):
        parsed_json(json.dumps(value).upper().replace("\\U", "\\u"))


def test_pairs_are_characters() -> None:
    assert parsed_json(json.dumps(["\U0001f600", "\\ud83d"])) == ["\U0001f600", "\\ud83d"]
    refuse_half_characters({"a": "\U0001f600"})


def test_what_is_not_like_json_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in ({(1, 2): "a"}, endless):
        with pytest.raises(RequestError, match="the prompt is not like JSON"):
            refuse_half_characters([value])
