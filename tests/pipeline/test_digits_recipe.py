"""The recipe of the head for the model that sees: by the project's own jobs, from drawn sheets to what ships."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from drafter.embedded import EMBEDDED_DIGITS
from drafter.heads.checkpoint import load_head
from drafter.target_model.loading import load_base
from recipes.digits import head

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("local_ray")
def test_a_head_learns_from_answers_about_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, output = tmp_path / "head.yaml", tmp_path / "out"
    short = yaml.safe_load(head.CONFIG.read_text(encoding="utf-8"))
    short["training"] |= {"steps": 2, "texts_per_step": 4, "evaluate_every": 2}
    config.write_text(yaml.safe_dump(short), encoding="utf-8")
    for name, value in {"_TEXTS": 8, "_HELD_OUT": 4, "CONFIG": config, "OTHER_HEADS": tmp_path}.items():
        monkeypatch.setattr(head, name, value)
    monkeypatch.setattr("ray.shutdown", lambda: None)  # other tests go on with it
    assert head.main(["--output", str(output)]) == 0
    assert head.main(["--output", str(output), "--ship"]) == 0
    shipped = load_head(tmp_path / head.NAME, load_base(EMBEDDED_DIGITS, dtype="float32"))
    assert shipped.config.depth == 10
    assert shipped.provenance is not None
    counts = shipped.provenance.training["data"]
    assert (counts["texts"], counts["with_images"], counts["held_out"]) == (8, 8, 4)
