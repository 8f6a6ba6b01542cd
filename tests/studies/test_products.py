from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import products


def test_products_are_measured_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHAPES", ((64, 32),))
    monkeypatch.setattr(products, "_WEIGHTS", 3 * 64 * 32)
    products.main(["--output", str(tmp_path), "--rows", "1", "3"])
    found = json.loads((tmp_path / products.PRODUCTS_FILE).read_text())["products"]
    assert [(one["origin"], one["rows"]) for one in found] == [("fp32", 1), ("fp32", 3), ("bf16", 1), ("bf16", 3)]
    assert all(one["torch"] > 0 and one["prepacked"] > 0 for one in found)
    assert "| 64 × 32 | bf16 | 3 |" in (tmp_path / products.TABLE_FILE).read_text()
