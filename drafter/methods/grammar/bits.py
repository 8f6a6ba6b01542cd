"""Bits of a mask `[ceil(V / 32)]` int32: that of token v is bit v % 32 of word v // 32."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

_WORD = 32


def allow(mask: Tensor, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token // _WORD] |= _bit(token)


def allow_all_but(mask: Tensor, tokens: Iterable[int]) -> None:
    mask.fill_(-1)
    for token in tokens:
        mask[token // _WORD] &= ~_bit(token)


def _bit(token: int) -> int:
    place = token % _WORD
    return -(1 << place) if place == _WORD - 1 else 1 << place
