from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies.stored_weights import main


@pytest.mark.slow
def test_both_ways_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from tests.support.gguf_files import tiny_llama, write_gguf

    write_gguf(tiny_llama(), tmp_path / "tiny.gguf")
    main(["--model", str(tmp_path / "tiny.gguf"), "--rows", "1", "2", "--rounds", "1", "--output", str(tmp_path)])
    stored, floats = json.loads((tmp_path / "stored_weights.json").read_text())["cells"]
    assert (stored["way"], floats["way"]) == ("as stored", "dequantised")
    assert 0 < stored["memory"]["imports"] <= stored["memory"]["most in loading"]
    assert list(stored["rates"]) == ["1", "2"]
    assert "| as stored |" in (tmp_path / "stored_weights.md").read_text()
