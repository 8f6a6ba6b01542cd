from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafter.embedded import EMBEDDED_BASE
from drafter.errors import LoadError
from drafter.native.build import cache_folder
from drafter.target_model import loading
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer


def test_a_tilde_is_the_users_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder().parent))  # or the native library goes to that home
    monkeypatch.setenv("HOME", str(EMBEDDED_BASE.parent))
    name = f"~/{EMBEDDED_BASE.name}"
    assert load_base(name, device="cpu").vocab_size >= len(load_tokenizer(name)) > 0


@pytest.mark.parametrize(
    ("place", "given", "expected"),
    [("cuda", None, {"": torch.device("cuda", 1)}), ("cuda", "auto", "auto"), ("cpu", None, None)],
)
def test_weights_go_to_a_gpu_as_they_are_read(
    place: str, given: str | None, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def from_pretrained(source: str, **kwargs: Any) -> None:
        asked.update(kwargs)
        raise OSError("no GPU is here")

    monkeypatch.setattr(
        loading, "pick_device", lambda device: torch.device("cuda", 1) if place == "cuda" else torch.device("cpu")
    )
    monkeypatch.setattr(loading, "auto_class", lambda config: SimpleNamespace(from_pretrained=from_pretrained))
    with pytest.raises(LoadError, match="no GPU is here"):
        load_base(EMBEDDED_BASE, device_map=given)
    assert asked.get("device_map") == expected
