"""Train a draft head for the model that sees, on its own answers to questions about sheets.

    python -m recipes.digits.head --model drafter/embedded/digits --output build/digits-head
    python -m recipes.digits.head --ship --output build/digits-head

The head sees an image through the model's hidden states alone. The sheets have digits that the model has learned from,
and none of those that are held out.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, AutoProcessor

from drafter.embedded import EMBEDDED_DIGITS, OTHER_HEADS
from drafter.target_model.loading import load_base
from drafter.training.targets import RegeneratedText
from recipes.digits.measuring import answer_ids, inputs_of
from recipes.digits.questions import questions
from recipes.digits.sheets import draw_sheet, glyphs
from recipes.embedded.train_head import HeadRecipe, train_head
from recipes.shipping import ship

NAME = "digits"
RECIPE = HeadRecipe(
    "ctc",
    {
        "depth": 10,
        "num_frames": 11,
        "num_layers": 1,
        "label_context": 10,
        "joint_layers": 2,
        "joint_size": 256,
        "depth_decay": 0.9,
    },
    {
        "steps": 600,
        "texts_per_step": 24,
        "anchors_per_text": 24,
        "teacher": 4,
        "precision": "bf16",
        "evaluate_every": 200,
    },
)
_TEXTS, _VALIDATION, _BATCH = 2_400, 60, 40


def answered(model: Any, processor: Any, number: int, seed: int) -> list[RegeneratedText]:
    """Return questions about sheets with the model's own greedy answers and its last hidden states `[L, d]`."""
    rng, some = random.Random(seed), glyphs(held_out=False)
    texts: list[RegeneratedText] = []
    while len(texts) < number:
        sheets = [draw_sheet(rng, some) for _ in range(_BATCH)]
        asked = [(sheet.image, questions(rng, sheet, 1)[0].text) for sheet in sheets]
        answers = answer_ids(model, processor, asked)
        inputs = inputs_of(processor, asked, padding_side="right")
        prompts = [ids[kept > 0] for ids, kept in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
        whole = [torch.cat(parts) for parts in zip(prompts, answers, strict=True)]
        # Padding follows each text, so that no token of it sees any.
        ids = pad_sequence(whole, batch_first=True, padding_value=processor.tokenizer.pad_token_id)
        with torch.inference_mode():
            hidden = model.model(input_ids=ids, pixel_values=inputs["pixel_values"], use_cache=False).last_hidden_state
        texts += [
            RegeneratedText(text.tolist(), len(prompt), states[: len(text)].to(torch.bfloat16).clone())
            for text, prompt, states in zip(whole, prompts, hidden, strict=True)
        ]
    return texts[:number]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, or ship what was trained; always returns 0."""
    parser = argparse.ArgumentParser(
        "python -m recipes.digits.head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=EMBEDDED_DIGITS, help="folder (default: the embedded one)")
    parser.add_argument("--output", type=Path, default=Path("build/digits-head"), help="folder (default: %(default)s)")
    parser.add_argument("--ship", action="store_true", help="put the trained head beside the others that ship")
    args = parser.parse_args(arguments)
    base = load_base(args.model, dtype="float32", device="cpu")
    if args.ship:
        ship(args.output / NAME, base, "drafter/embedded/digits", OTHER_HEADS / NAME)
        return 0
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(args.model)
    data = {
        "validation": answered(model, processor, _VALIDATION, seed=2),
        "known_digits": answered(model, processor, _TEXTS, seed=1),
    }
    train_head(NAME, RECIPE, base, data, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
