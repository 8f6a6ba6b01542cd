"""Draft heads by the name of their algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafter.ctc.head import CTCHead
from drafter.errors import LoadError
from drafter.heads.config import head_config
from drafter.heads.contract import DraftHead
from drafter.plugins import resolved
from drafter.target.model import BaseModel

HEADS: dict[str, type[DraftHead]] = {CTCHead.algorithm: CTCHead, **resolved("heads")}


def new_head(
    algorithm: str, base: BaseModel, settings: Mapping[str, Any], token_counts: Tensor | None = None
) -> DraftHead:
    """Return an untrained head on the target model's device, in float32.

    Args:
        algorithm: A key of `HEADS`.
        base: The target model. It decides `hidden_size` and `vocab_size`.
        settings: Other fields of the algorithm's configuration.
        token_counts: `[V]` token frequencies in the training texts, which choose the draft vocabulary. Needed with a
            `draft_vocab_size` only.

    Raises:
        LoadError: The algorithm or a field is unknown, or a value is invalid.
        ValueError: There is a `draft_vocab_size`, but no `token_counts`.
    """
    if algorithm not in HEADS:
        raise LoadError(f"no draft head {algorithm!r}: known are {', '.join(HEADS)}")
    sizes = {"hidden_size": base.hidden_size, "vocab_size": base.vocab_size}
    head_class = HEADS[algorithm]
    fields = {**head_class.defaults(base.config.num_hidden_layers), **settings, **sizes}
    head = head_class(head_config(algorithm, head_class.config_class, fields))
    head.to(base.device)
    if head.vocabulary is not None:
        if token_counts is None:
            raise ValueError("a draft vocabulary is chosen by how often tokens occur: give token_counts")
        head.vocabulary.choose(token_counts)
        head.vocabulary.borrow(base)
    head.start_from(base)
    return head
