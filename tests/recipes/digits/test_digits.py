"""The model that sees: its training, and the one that ships, by plain transformers."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from drafter.embedded import EMBEDDED_DIGITS
from recipes.digits import training
from recipes.digits.__main__ import main
from recipes.digits.measuring import answers
from recipes.digits.questions import read_digits
from recipes.digits.sheets import draw_sheet, glyphs
from recipes.digits.training import batch_of, conversations, patch_labels


def test_the_model_that_ships_reads_digits_that_it_has_not_seen() -> None:
    rng = random.Random(7)
    sheets = [draw_sheet(rng, glyphs(held_out=True), strip=True) for _ in range(25)]
    model = AutoModelForImageTextToText.from_pretrained(EMBEDDED_DIGITS, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(EMBEDDED_DIGITS)
    said = answers(model, processor, [(sheet.image, "Read the digits.") for sheet in sheets])
    right = sum(one == read_digits(sheet) for one, sheet in zip(said, sheets, strict=True))
    assert right >= 22


def test_answers_are_learned_and_nothing_else() -> None:
    processor = AutoProcessor.from_pretrained(EMBEDDED_DIGITS)
    some = list(islice(conversations(1), 40))
    assert {len(images) for images, _ in some} == {0, 1, 2, 3}
    batch = batch_of(processor, some)
    for labels, (images, asked) in zip(batch["labels"], some, strict=True):
        learned = processor.tokenizer.decode(labels[labels >= 0])
        assert learned == "".join(f"{question.answer}<|end|>" for question in asked), len(images)


def test_patches_are_labelled_with_the_digits_in_them() -> None:
    sheet = draw_sheet(random.Random(5), glyphs(held_out=False), strip=False)
    digits, rows, columns = patch_labels(sheet).unbind(1)
    assert digits.shape == (16,)
    there = digits < 10
    assert digits[there].tolist() == sheet.digits
    assert rows[there].tolist() == [row for row, line in enumerate(sheet.rows) for _ in line]
    assert columns[there].tolist() == [column for line in sheet.rows for column in range(len(line))]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_TOWER_STEPS", 1)
    monkeypatch.setattr(training, "_TOWER_SHEETS", 2)
    monkeypatch.setattr(training, "CONVERSATIONS", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_a_training_goes_on_at_its_last_checkpoint(tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path), "--sheets", "2"]
    assert main([*arguments, "--steps", "2"]) == 0
    before = torch.load(tmp_path / "state.pt", weights_only=True)
    assert main([*arguments, "--steps", "3"]) == 0
    after = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (before["step"], after["step"]) == (2, 3)
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["steps"] == 3
    assert set(report["right"]["strips_of_held_out_digits"]) == {"read", "add", "largest", "where", "count"}
    assert AutoModelForImageTextToText.from_pretrained(tmp_path).dtype == torch.bfloat16
