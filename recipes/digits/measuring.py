"""How many questions about unseen sheets the model answers right, by plain transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from recipes.digits.questions import KINDS, Question, question_of
from recipes.digits.sheets import Glyph, draw_sheet, glyphs

_BATCH, _LONGEST = 25, 160


def measure(folder: Path, sheets: int, seed: int = 1_000_003) -> dict[str, dict[str, float]]:
    """Return the shares of right answers, for each kind of question, about strips and grids that nobody has seen.

    Args:
        folder: The model's.
        sheets: How many sheets of each shape; the digits on them are held out, or else those of the training.
        seed: Of the sheets.
    """
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    shares: dict[str, dict[str, float]] = {}
    for held_out in (True, False):
        for strip in (True, False):
            rng = random.Random(seed)
            some = glyphs(held_out=held_out)
            name = f"{'strips' if strip else 'grids'}_of_{'held_out' if held_out else 'known'}_digits"
            shares[name] = {}
            for kind in KINDS:
                asked = _draw(rng, some, strip, kind, sheets)
                said = answers(model, processor, [(image, question.text) for image, question in asked])
                right = sum(one == question.answer for one, (_, question) in zip(said, asked, strict=True))
                shares[name][kind] = round(right / sheets, 4)
    return shares


def answers(model: Any, processor: Any, asked: Sequence[tuple[Image.Image, str]]) -> list[str]:
    """Return the model's greedy answers to questions about one image each."""
    said: list[str] = []
    for some in (asked[start : start + _BATCH] for start in range(0, len(asked), _BATCH)):
        chats = [
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
            for _, question in some
        ]
        texts = processor.apply_chat_template(chats, add_generation_prompt=True)
        images = [image for image, _ in some]
        inputs = processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=_LONGEST, do_sample=False)
        said += processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def _draw(
    rng: random.Random, some: Sequence[Glyph], strip: bool, kind: str, number: int
) -> list[tuple[Image.Image, Question]]:
    """Draw sheets, and a question of one kind about each."""
    sheets = [draw_sheet(rng, some, strip=strip) for _ in range(number)]
    return [(sheet.image, question_of(kind, rng, sheet)) for sheet in sheets]
