"""Where prompts are looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import InputError
from pipeline.io.listing import PromptSource, find_prompts, list_input
from pipeline.settings import ReadingConfig
from tests.pipeline.conftest import write_jsonl


def test_where_prompts_are_looked_for(tmp_path: Path) -> None:
    def source(row: dict[str, Any], **settings: Any) -> PromptSource:
        listing = list_input(str(write_jsonl(tmp_path / "a.jsonl", [row])))
        return find_prompts(listing, ReadingConfig(**settings))

    chat = [{"role": "user", "content": "x"}]
    assert source({"prompt": "x", "messages": chat}) == PromptSource("prompt")
    assert source({"messages": chat}) == PromptSource("messages", "messages")
    assert source({"prompt": "x", "messages": chat}, messages_column="messages") == PromptSource("messages", "messages")
    assert source({"q": "x"}, prompt_column="q") == PromptSource("q")
    own = {"prompt": "x", "sampling": {"temperature": 1}}
    assert source(own) == PromptSource("prompt", own_sampling=True)
    assert source(own, sampling_column="settings") == PromptSource("prompt")
    with pytest.raises(InputError, match=r"has no column 'prompt' \(it has q\): set reading.prompt_column"):
        source({"q": "x"})
