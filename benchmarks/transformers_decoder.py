"""transformers' `generate` as a decoder beside this project's engines."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from drafter.devices import synchronise
from drafter.evaluation.decoders import Decoder, Run
from drafter.requests import Request, sampling_defaults
from drafter.target_model.prepacked import as_loaded


def padding(tokenizer: Any) -> int:
    """Return a padding token. Any token will do, because padding is masked."""
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


def transformers_decoder(model: Any, ends: Collection[int], batch: int, pad: int, **settings: Any) -> Decoder:
    """Return a decoder that calls a model's `generate` as its users do, in batches padded on the left.

    `ends` are the tokens that end a text, `settings` further ones of `generate`. The requests must share their sampling
    settings except the seed. Above temperature 0 `generate` draws with its own random generator.
    """

    def generate(requests: Sequence[Request]) -> list[list[int]]:
        prompts, sampling = [list(request.prompt_ids) for request in requests], requests[0].sampling
        sampling = sampling.over(sampling_defaults(model.generation_config.to_dict(), "of `generate`"))
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        drawn = {"do_sample": True} | {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        torch.manual_seed(sampling.seed)
        with as_loaded(model):
            made = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=pad,
                **(drawn if sampling.temperature > 0 else {"do_sample": False}),
                **settings,
            )
        return [_until_end(row, ends) for row in made[:, width:].tolist()]

    def decode(requests: Sequence[Request]) -> Run:
        synchronise(model.device)
        start = time.perf_counter()
        outputs = [o for first in range(0, len(requests), batch) for o in generate(requests[first : first + batch])]
        synchronise(model.device)
        return Run(time.perf_counter() - start, outputs)

    return decode


def _until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Return `tokens` up to the first end token, inclusive."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)
