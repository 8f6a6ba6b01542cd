from __future__ import annotations

import pytest

from drafter.embedded import EMBEDDED_BASE
from drafter.native.build import cache_folder
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer


def test_a_tilde_is_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder().parent))  # or the native library goes to that home
    monkeypatch.setenv("HOME", str(EMBEDDED_BASE.parent))
    name = f"~/{EMBEDDED_BASE.name}"
    assert load_base(name, device="cpu").vocab_size >= len(load_tokenizer(name)) > 0
