"""Comparison of very many rows by hashes of their names and requests, in a few dozen bytes a row: `match`.

Keys are arrays of 64-bit integers, [N, 2]: rows are equal where both columns are. Those of a text are a hash of 128
bits, so that two texts of a hundred million rows share one with a probability of 1e-23.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
"""Indices into rows, [N]; -1 is none."""
_BYTES = 16


def content_hash(text: str) -> bytes:
    """Return a hash of a text. Seeds follow from those of requests: another one would change sampled tokens."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest()


def text_keys(texts: Iterable[str | None]) -> Keys:
    """Return the keys of texts, [N, 2]; zero for None."""
    hashed = (b"\0" * _BYTES if text is None else content_hash(text) for text in texts)
    return np.frombuffer(b"".join(hashed), np.uint64).reshape(-1, 2)


def mixed(keys: Keys, more: npt.NDArray[np.uint64]) -> Keys:
    """Return keys of rows that are equal where `keys` and `more` ([N, 2] or [N, 1]) are, in the two columns of one.

    What is multiplied by an odd number keeps all of its bits.
    """
    return keys ^ (more * np.uint64(0x9E3779B97F4A7C15))


def numbered(*keys: Keys) -> list[Places]:
    """Return a number for each row of each array: the same where their keys are equal, here and across arrays."""
    together = np.concatenate(keys)
    order = np.lexsort(together.T)
    begins = np.zeros(len(order), bool)
    begins[:1] = True
    for column in together.T:
        ordered = column[order]
        begins[1:] |= ordered[1:] != ordered[:-1]
    numbers = np.empty(len(together), np.int64)
    numbers[order] = np.cumsum(begins) - 1
    return np.split(numbers, np.cumsum([len(one) for one in keys])[:-1])


def occurrences(numbers: Places) -> Places:
    """Return for each number how many equal ones come before it."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    begins = np.ones(len(ordered), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    at = np.arange(len(ordered))
    found = np.empty(len(ordered), np.int64)
    found[order] = at - np.maximum.accumulate(np.where(begins, at, 0))
    return found


def equal_before(seed_names: Keys) -> Places:
    """Return how many rows before each have its `seed_name`; 0 for rows with a problem, which have none."""
    (numbers,) = numbered(seed_names)
    return np.where(seed_names.any(axis=1), occurrences(numbers), 0)


def places_of(keys: Keys, among: Keys) -> Places:
    """Return where each row is `among` others: the last of those with its key."""
    mine, theirs = numbered(keys, among)
    place = np.full(len(keys) + len(among), -1)
    place[theirs] = np.arange(len(among))
    return place[mine]


def pair(before: Keys, now: Keys) -> tuple[Places, Places]:
    """Pair equal rows, the first with the first, the second with the second: indices of both, in order of `before`."""
    numbers = numbered(before, now)
    most = len(before) + len(now)
    one, other = (number * most + occurrences(number) for number in numbers)
    _, first, second = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    return first, second


@dataclass(frozen=True)
class AskedRows:
    """Requests of N rows, as keys.

    Args:
        names: Of the rows' names, [N, 2].
        seeds: Of what their seeds follow from, and how many equal ones come before, [N, 2].
        requests: Of their prompts, their own settings and their sample numbers, [N, 2].
    """

    names: Keys
    seeds: Keys
    requests: Keys

    def __len__(self) -> int:
        return len(self.names)


def asked_rows(rows: pa.Table, repeats: Sequence[int] = (), *, several: bool) -> AskedRows:
    """Return the requests of staged rows; with `several`, an input row may be several, named `ID#0`, `ID#1`, ….

    `repeats` are those of a `Part`.
    """
    names, asked, problems = (rows[name].to_pylist() for name in ("request_id", "asked", "problem"))
    texts = (
        f"{name.rpartition('#')[2] if several else ''} {json.dumps(problem) if text is None else text}"
        for name, text, problem in zip(names, asked, problems, strict=True)
    )
    seeds = text_keys(rows["seed_name"].to_pylist())
    if repeats:
        seeds = numbered_seeds(seeds, np.array(repeats))
    return AskedRows(text_keys(names), seeds, text_keys(texts))


def numbered_seeds(seed_names: Keys, repeats: Places) -> Keys:
    """Return the keys of what seeds follow from, of rows with so many equal ones before them."""
    return mixed(seed_names, repeats.astype(np.uint64)[:, None])


def joined(pieces: Sequence[AskedRows]) -> AskedRows:
    empty = AskedRows(*(np.empty((0, 2), np.uint64) for _ in range(3)))
    columns = zip(*((one.names, one.seeds, one.requests) for one in [empty, *pieces]), strict=True)
    return AskedRows(*map(np.concatenate, columns))


def match(before: AskedRows, now: AskedRows, *, drawn: bool) -> Places:
    """Match each current row to an old one with the same request, at best of the same seed. Each index is used once.

    Where tokens are `drawn`, another seed would give others, so that only a row of the same seed matches.
    """
    found, free = np.full(len(now), -1), np.arange(len(before))
    exact = [mixed(rows.requests, rows.seeds) for rows in (before, now)]
    for theirs, ours in [exact] if drawn else [exact, [before.requests, now.requests]]:
        left = np.flatnonzero(found < 0)
        first, second = pair(theirs[free], ours[left])
        found[left[second]] = free[first]
        free = np.delete(free, first)
    return found
