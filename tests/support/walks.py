"""Random outputs under a guide, without a model: at each step one of the tokens that its mask allows."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from drafter.acceptance.choices import bits
from drafter.acceptance.guide import Guide


def walk(guide: Guide, tokenizer: Any, rng: Random, length: int = 400, patience: int = 60) -> str | None:
    """Return a text that the guide lets end; None if it has not ended after `length` tokens.

    After `patience` tokens it chooses those that close what is open, where it may.

    Raises:
        AssertionError: The mask is empty, or allows what the guide then refuses.
    """
    eos, size = int(tokenizer.eos_token_id), len(tokenizer)
    closing = [token for text in ('"', "}", "]", '"}', '"]') for token in tokenizer.encode(text) if token != eos]
    mask = torch.zeros((size + 31) // 32, dtype=torch.int32)
    written: list[int] = []
    for step in range(length):
        guide.fill(mask)
        allowed = set(bits(mask[None], size)[0].nonzero()[:, 0].tolist())
        assert allowed, (guide.problem, tokenizer.decode(written))
        closers = [token for token in closing if token in allowed]
        if eos in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            assert guide.consume(eos), guide.problem
            return str(tokenizer.decode(written))
        if closers and rng.random() < (0.9 if step > patience else 0.2):
            token = rng.choice(closers)
        else:
            token = rng.choice(sorted(allowed - {eos}))
        assert guide.consume(token), (guide.problem, token, tokenizer.decode(written))
        written.append(token)
    return None
