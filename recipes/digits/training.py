"""Training of the model that sees: a small LLaVA from nothing, with a tokeniser and a processor of its own."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessorPil,
    LlavaProcessor,
    SiglipVisionConfig,
)

from recipes.digits.questions import Question, question_of_none, question_of_several, questions
from recipes.digits.sheets import COLUMNS, ROWS, Sheet, draw_sheet, glyphs
from recipes.embedded.train_base import MAX_LENGTH, train_tokenizer

SIDE, PATCH = 64, 16
VOCABULARY = 512
IMAGE = "<image>"
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", IMAGE]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message['role'] }}|>
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif -%}
{%- endfor -%}
{%- endif -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
CONVERSATIONS = 16
"""Conversations a step."""
_TURNS = 3
_RATE, _WARM_UP = 2e-3, 100
_LINE_STEPS, _SAVE_STEPS = 20, 100
_TOWER_STEPS, _TOWER_SHEETS, _TOWER_RATE, _STRIPS = 500, 64, 2e-3, 0.25
"""First the vision tower learns alone, which costs little; then it stays as it is."""
_NO_DIGIT = 10
_CLASSES = (_NO_DIGIT + 1, ROWS, COLUMNS)
_SORTED = 4
"""Batches that are made at once: with conversations of similar length in each, little of it is padding."""

Conversation = tuple[list[Image.Image], list[Question]]


def conversations(seed: int) -> Iterator[Conversation]:
    """Yield conversations without end: images of digits that are not held out, and questions about all of them.

    Most have one image and three questions; some have two or three images, or none.
    """
    rng, some = random.Random(seed), glyphs(held_out=False)
    while True:
        draw = rng.random()
        if draw < 0.04:
            yield [], [question_of_none(rng)]
        elif draw < 0.12:
            sheets = [draw_sheet(rng, some) for _ in range(rng.randint(2, 3))]
            yield [sheet.image for sheet in sheets], [question_of_several(rng, sheets)]
        else:
            sheet = draw_sheet(rng, some)
            yield [sheet.image], questions(rng, sheet, _TURNS)


def messages_of(images: int, asked: Sequence[Question]) -> list[dict[str, Any]]:
    """Return questions and answers as messages, with so many images before the first question."""
    messages: list[dict[str, Any]] = []
    for number, question in enumerate(asked):
        pictures = [{"type": "image"}] * (images if number == 0 else 0)
        messages.append({"role": "user", "content": [*pictures, {"type": "text", "text": question.text}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": question.answer}]})
    return messages


def build_processor() -> LlavaProcessor:
    """Train a tokeniser on questions and answers, and return it with the image processor.

    Images are padded to a square and made `SIDE` pixels wide.
    """
    texts = (text for _, asked in islice(conversations(0), 2_000) for q in asked for text in (q.text, q.answer))
    tokenizer = train_tokenizer(texts, VOCABULARY, SPECIAL_TOKENS)
    sees = LlavaImageProcessorPil(
        do_pad=True,
        size={"height": SIDE, "width": SIDE},
        do_center_crop=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return LlavaProcessor(
        sees, tokenizer, patch_size=PATCH, vision_feature_select_strategy="full", chat_template=CHAT_TEMPLATE
    )


def build_model(processor: LlavaProcessor) -> LlavaForConditionalGeneration:
    """Return a LLaVA of three million random weights: a SigLIP of four layers and a Llama of six."""
    tokenizer = processor.tokenizer
    sight = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        initializer_range=0.05,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=sight,
            text_config=text,
            image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
            image_seq_length=(SIDE // PATCH) ** 2,
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        )
    )


def train_tower(model: LlavaForConditionalGeneration, processor: LlavaProcessor, seed: int) -> None:
    """Train the vision tower alone: each patch says which digit is there, in which row and which column.

    Without it the language model would have to find out what a digit is and where the next one is at the same time.
    """
    tower, width = model.model.vision_tower, model.config.vision_config.hidden_size
    judge = torch.nn.Linear(width, sum(_CLASSES))
    optimiser = torch.optim.AdamW([*tower.parameters(), *judge.parameters()], lr=_TOWER_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, _cosine(_TOWER_STEPS))
    rng, some = random.Random(seed), glyphs(held_out=False)
    for step in range(1, _TOWER_STEPS + 1):
        sheets = [draw_sheet(rng, some, strip=rng.random() < _STRIPS) for _ in range(_TOWER_SHEETS)]
        pixels = processor.image_processor([sheet.image for sheet in sheets], return_tensors="pt")["pixel_values"]
        with torch.autocast("cpu", torch.bfloat16):
            seen = tower(pixels, output_hidden_states=True).hidden_states[model.config.vision_feature_layer]
            judged = judge(seen).float().flatten(0, 1).split(_CLASSES, 1)
        labels = torch.cat([patch_labels(sheet) for sheet in sheets]).unbind(1)
        there = labels[0] != _NO_DIGIT
        losses = [F.cross_entropy(judged[0], labels[0], reduction="sum") / there.sum()]
        losses += [F.cross_entropy(judged[k][there], labels[k][there]) for k in (1, 2)]
        loss = torch.stack(losses).sum()
        _learn(loss, optimiser, schedule)
        if step % _LINE_STEPS == 0:
            best = [judged[0][there][:, :_NO_DIGIT], judged[1][there], judged[2][there]]
            right = [(one.argmax(1) == label[there]).float().mean() for one, label in zip(best, labels, strict=True)]
            shares = ", ".join(f"{share:.3f}" for share in right)
            print(f"tower {step:5d}  loss {loss.item():.3f}  right: {shares}", file=sys.stderr, flush=True)


def patch_labels(sheet: Sheet) -> torch.Tensor:
    """Return for each patch `[patches, 3]` of a sheet's square the digit that is there, its row and its column.

    Where there is none, the digit is `_NO_DIGIT`.
    """
    side, (width, height) = max(sheet.image.size), sheet.image.size
    columns, patches = len(sheet.rows[0]), SIDE // PATCH
    labels = torch.full((patches, patches, 3), _NO_DIGIT)
    for place, ((x, y), digit) in enumerate(zip(sheet.corners, sheet.digits, strict=True)):
        down, across = ((at + (side - long) // 2) * patches // side for at, long in ((y, height), (x, width)))
        labels[down, across] = torch.tensor([digit, place // columns, place % columns])
    return labels.flatten(0, 1)


def _cosine(steps: int) -> Callable[[int], float]:
    """Return a schedule that warms up, and falls to a hundredth along half a cosine."""
    return lambda step: min((step + 1) / _WARM_UP, 0.5 * (1.02 + 0.98 * math.cos(math.pi * min(step / steps, 1.0))))


def _learn(
    loss: torch.Tensor, optimiser: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler
) -> None:
    """Take one step."""
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([weight for group in optimiser.param_groups for weight in group["params"]], 1.0)
    optimiser.step()
    schedule.step()


def batch_of(processor: LlavaProcessor, some: Sequence[Conversation]) -> dict[str, torch.Tensor]:
    """Return what the model takes: ids and labels `[B, L]`, and the images. Outside of answers, labels are -100."""
    tokenizer = processor.tokenizer
    texts = [processor.apply_chat_template(messages_of(len(images), asked)) for images, asked in some]
    pictures = [image for images, _ in some for image in images]
    inputs = processor(text=texts, images=pictures or None, padding=True, padding_side="right", return_tensors="pt")
    start, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    ids = inputs["input_ids"]
    # An answer begins behind each <|assistant|> and ends with the next <|end|>.
    starts, ends = (ids == start).long().cumsum(1), (ids == end).long().cumsum(1)
    ended_before = ends - (ids == end).long()
    answered = (2 * starts - 1 == ended_before) & (ids != start)
    return {**inputs, "labels": ids.masked_fill(~answered, -100)}


def batches(processor: LlavaProcessor, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches without end, each of `CONVERSATIONS` conversations of similar length; see `batch_of`."""
    stream, rng = conversations(seed), random.Random(seed)
    while True:
        some = sorted(islice(stream, CONVERSATIONS * _SORTED), key=_length)
        groups = [some[start : start + CONVERSATIONS] for start in range(0, len(some), CONVERSATIONS)]
        rng.shuffle(groups)
        for group in groups:
            yield batch_of(processor, group)


def _length(conversation: Conversation) -> int:
    """About how long a conversation is, in tokens: what it takes in images, and two characters a token."""
    images, asked = conversation
    return len(images) * (SIDE // PATCH) ** 2 + sum(len(q.text) + len(q.answer) for q in asked) // 2


def train(folder: Path, steps: int, seed: int = 0) -> dict[str, Any]:
    """Train the model, and save it in bf16 with its processor; started again it goes on at its last checkpoint.

    Args:
        folder: Where all goes.
        steps: Of training, each of `CONVERSATIONS` conversations.
        seed: Of weights and conversations.

    Returns:
        What there is to say of the training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    processor = build_processor()
    processor.save_pretrained(folder)
    model = build_model(processor)
    model.set_attn_implementation("eager")  # on CPUs a step takes two thirds of the time
    weights = [weight for name, weight in model.named_parameters() if "vision_tower" not in name]
    optimiser = torch.optim.AdamW(weights, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, _cosine(steps))
    state_file, first = folder / "state.pt", 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        first = state["step"]
        for part, saved in ((model, "model"), (optimiser, "optimiser"), (schedule, "schedule")):
            part.load_state_dict(state[saved])
    else:
        train_tower(model, processor, seed)
    model.model.vision_tower.requires_grad_(False)
    # Seeded by the step, so that a training that goes on sees other conversations than before.
    stream = batches(processor, seed + 1 + first)
    print(f"{model.num_parameters():,} parameters", file=sys.stderr, flush=True)
    began = time.monotonic()
    for step in range(first + 1, steps + 1):
        batch = next(stream)
        labels = batch.pop("labels")
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**batch, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        _learn(loss, optimiser, schedule)
        if step % _LINE_STEPS == 0:
            pace = (time.monotonic() - began) / (step - first)
            print(f"step {step:5d}  loss {loss.item():.3f}  {pace:.2f} s a step", file=sys.stderr, flush=True)
        if step % _SAVE_STEPS == 0 or step in (1, steps):
            parts = {"model": model, "optimiser": optimiser, "schedule": schedule}
            temporary = state_file.with_suffix(".tmp")
            torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, temporary)
            temporary.replace(state_file)
    model.to(torch.bfloat16).save_pretrained(folder)
    return {"parameters": model.num_parameters(), "steps": steps, "conversations_per_step": CONVERSATIONS, "seed": seed}
