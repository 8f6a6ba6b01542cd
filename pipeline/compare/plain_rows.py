"""Rows generated again without drafts, and where they differ from what an output says. Runs on a worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.base.loading import load_base, load_tokenizer
from drafter.drafters.none import PlainDecoding
from drafter.engine.engine_config import EngineConfig
from drafter.engine.loop import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import decode_all
from pipeline.compare.repeated_rows import RepeatedRow
from pipeline.compare.token_differences import first_difference


@dataclass(frozen=True)
class Choice:
    """What a text has at a place.

    Args:
        token: The token; None where the text has ended.
        text: It as text.
        logit: The base's logit of it there; None where there is no token.
    """

    token: int | None
    text: str
    logit: float | None


@dataclass(frozen=True)
class AuditDifference:
    """Where an output's row is not what plain decoding gives.

    Args:
        name: The row's name.
        place: The first token that differs.
        said: What the output has there.
        plain: What plain decoding chooses there.
    """

    name: str
    place: int
    said: Choice
    plain: Choice


def plain_differences(
    model: str,
    loading: Mapping[str, Any],
    engine: Mapping[str, Any],
    fingerprint: str | None,
    rows: Sequence[RepeatedRow],
    threads: int,
) -> Iterator[AuditDifference]:
    """Generate rows by plain decoding, and yield where they differ.

    Args:
        model: Hub id or folder of the base.
        loading: How it was loaded: further arguments of `load_base`.
        engine: The engine's settings; see `EngineSettings`.
        fingerprint: Of the base that made the output; None where it is not known.
        rows: The rows.
        threads: CPU threads.

    Raises:
        LoadError: The base cannot be loaded, or is another one.
    """
    torch.set_num_threads(threads)
    base = load_base(model, **loading)
    if fingerprint is not None and not base.has_fingerprint(fingerprint):
        raise LoadError(
            f"{model} is not the base that made the output (its weights are {base.fingerprint}, those of the output "
            f"{fingerprint}): have that base where the output's run.json names it"
        )
    tokenizer = load_tokenizer(model, trust_remote_code=bool(loading["trust_remote_code"]))
    config = EngineConfig(**engine, max_queue=len(rows))
    _, found = decode_all(Engine(base, PlainDecoding(), tokenizer, config), [row.request for row in rows])
    for row, plain in zip(rows, found, strict=True):
        place = first_difference(row.token_ids, plain.token_ids)
        if place is not None:
            logits = _logits(base, [*row.request.prompt_ids, *row.token_ids[:place]])
            said, chosen = (_choice(tokens, place, logits, tokenizer) for tokens in (row.token_ids, plain.token_ids))
            yield AuditDifference(row.request.request_id, place, said, chosen)


@torch.inference_mode()
def _logits(base: BaseModel, tokens: Sequence[int]) -> Tensor:
    """The base's logits `[V]` after a text, by one forward over it."""
    text = torch.tensor(tokens, device=base.device)
    logits, _ = base.prefill_last(base.new_cache(1, len(tokens) + 1), 0, text)
    return logits[0].float().cpu()


def _choice(tokens: Sequence[int], place: int, logits: Tensor, tokenizer: Any) -> Choice:
    if place >= len(tokens):
        return Choice(None, "", None)
    token = tokens[place]
    return Choice(token, tokenizer.decode([token]), float(logits[token]))
