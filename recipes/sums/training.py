"""Training of the two models: the base, and the smaller one that drafts for it and is not always right."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.sums.problems import training_texts, words

_BATCH, _RATE = 64, 3e-3
_WARM_UP = 50
_LINE_STEPS = 100
_PAD, _END = "<pad>", "<end>"


@dataclass(frozen=True)
class Size:
    """How large a model is, and how and how long it learns.

    Args:
        width: Of the hidden states.
        layers: How many.
        steps: Of training, each of 64 sums.
        taste: How much it prefers one wording of each step; see `Problem.worked_out`.
    """

    width: int
    layers: int
    steps: int
    taste: int = 0


BASE, DRAFT = Size(64, 4, 900), Size(48, 2, 400, taste=6)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokeniser to which each word and each number is one token."""
    vocabulary = {word: place for place, word in enumerate([_PAD, _END, *words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, clean_up_tokenization_spaces=False
    )


def train(size: Size, tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int = 0) -> None:
    """Train a model from nothing, the same each time, and save it with the tokeniser.

    Args:
        size: Of the model.
        tokenizer: Its tokeniser.
        folder: Where it goes.
        seed: Of weights and texts.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=size.width,
            intermediate_size=2 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / _WARM_UP, 1.0) * (1 - step / size.steps) ** 0.5
    )
    texts = training_texts(seed, size.taste)
    for step in range(size.steps):
        loss = _loss(model, tokenizer, list(islice(texts, _BATCH)))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if (step + 1) % _LINE_STEPS == 0:
            print(
                f"{folder.name}: step {step + 1} of {size.steps}, loss {loss.item():.3f}", file=sys.stderr, flush=True
            )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[tuple[str, str]]) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens; questions are read and not learned."""
    ids = [tokenizer(f"{question} {answer} {_END}")["input_ids"] for question, answer in texts]
    asked = [len(question.split()) for question, _ in texts]
    longest = max(map(len, ids))
    batch = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in ids])
    places = torch.arange(longest)
    counted = (places >= torch.tensor(asked)[:, None]) & (places < torch.tensor([len(row) for row in ids])[:, None])
    logits = model(batch, use_cache=False).logits
    labels = batch.masked_fill(~counted, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
