"""How many questions about unseen sheets the model answers right, by plain transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from recipes.digits.questions import KINDS, Question, question_of
from recipes.digits.sheets import Glyph, draw_sheet, glyphs

_BATCH, _LONGEST = 25, 160

Asked = Sequence[tuple[Image.Image, str]]
"""Questions about one image each."""


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


def answers(model: Any, processor: Any, asked: Asked) -> list[str]:
    """Return the model's greedy answers."""
    groups = [asked[start : start + _BATCH] for start in range(0, len(asked), _BATCH)]
    ids = [one for some in groups for one in answer_ids(model, processor, some)]
    return list(processor.batch_decode(ids, skip_special_tokens=True))


def answer_ids(model: Any, processor: Any, asked: Asked) -> list[Tensor]:
    """Return the tokens of the model's greedy answers, each with its end-of-sequence token; all at once."""
    inputs = inputs_of(processor, asked, padding_side="left")
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=_LONGEST, do_sample=False)
    ids = ids[:, inputs["input_ids"].shape[1] :]
    return [one[one != processor.tokenizer.pad_token_id] for one in ids]


def inputs_of(processor: Any, asked: Asked, padding_side: str) -> Any:
    """Return what the model takes for questions, padded on one side."""
    chats = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}] for _, question in asked
    ]
    texts = processor.apply_chat_template(chats, add_generation_prompt=True)
    images = [image for image, _ in asked]
    return processor(text=texts, images=images, padding=True, padding_side=padding_side, return_tensors="pt")


def _draw(
    rng: random.Random, some: Sequence[Glyph], strip: bool, kind: str, number: int
) -> list[tuple[Image.Image, Question]]:
    """Draw sheets, and a question of one kind about each."""
    sheets = [draw_sheet(rng, some, strip=strip) for _ in range(number)]
    return [(sheet.image, question_of(kind, rng, sheet)) for sheet in sheets]
