"""What the demonstration with images asks, and how it counts right answers. CI runs it whole, by `make demo-images`."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from examples.demo import SPECULATIVE
from examples.demo_images import QUESTIONS, accuracy, draw
from tests.pipeline.report.outputs import write_output


def test_each_question_has_an_image_and_a_right_answer(tmp_path: Path) -> None:
    draw(tmp_path, 10)
    rows = [json.loads(line) for line in (tmp_path / QUESTIONS).read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == 10
    sizes = set()
    for row in rows:
        with Image.open(tmp_path / row["image"]) as image:
            assert image.format == "PNG"
            sizes.add(image.size)
        assert row["question"]
        assert row["right"].endswith(".")
    assert sizes == {(128, 64), (128, 128)}


def test_equal_texts_are_right_answers(tmp_path: Path) -> None:
    texts = ["The sum is 9.", "The sum is 8.", "There is no 5."]
    rows = [
        {"id": str(number), "accepted": [0, 0], "token_ids": [5, 6], "marks": {"text": text, "right": right}}
        for number, (text, right) in enumerate(
            zip(texts, ["The sum is 9.", "The sum is 9.", "There is no 5."], strict=True)
        )
    ]
    output = write_output(tmp_path / SPECULATIVE, [rows], [])
    output.run_file.write_text("{}")
    assert accuracy(tmp_path) == 0.6667
