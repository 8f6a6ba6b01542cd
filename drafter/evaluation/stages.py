"""Where a step's time goes: the engine's and the drafters' functions, timed from outside."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from drafter.devices import synchronise
from drafter.drafters import merged as ensemble
from drafter.drafters import ngram
from drafter.engine.loop import Engine
from drafter.evaluation.decoders import decode_all
from drafter.heads import hydra, medusa
from drafter.heads.ctc import ctc_head as ctc
from drafter.heads.ctc import frame_lattice as ctc_lattice
from drafter.requests import Request

STAGES = ("draft", "tree", "verify", "commit", "host")
"""Stages of a decoding step: the head's forwards, the tree search, the base's forward and the walk, moving what was
accepted, and everything else."""

_SEARCHES = ("best_trie", "best_lattice_trie", "best_product_trie", "static_tree", "from_paths", "merge")
_TREE_AND_DRAFT = [
    *(
        (module, name, "tree")
        for module in (ctc, medusa, hydra, ngram, ensemble)
        for name in _SEARCHES
        if hasattr(module, name)
    ),
    # A search over labels calls the head for each depth; that is drafting.
    (ctc_lattice.FrameLattice, "score", "draft"),
    (ctc_lattice._PreparedLattice, "score", "draft"),
    (hydra._Paths, "score", "draft"),
]


def stage_seconds(engine: Engine, requests: Sequence[Request]) -> tuple[dict[str, float], int]:
    """Decode the requests; return the seconds spent in each of `STAGES`, prefills left out, and the new tokens."""
    clock = StageClock(engine.base.device)
    stages = [
        (engine, "step", "host"),
        (engine, "_admit", "prefill"),
        (engine.drafter, "propose", "draft"),
        (engine.rows, "verify", "verify"),
        (engine.rows, "commit", "commit"),
        *_TREE_AND_DRAFT,
    ]
    # A step that is repeated as a whole has no stages.
    with patch.object(engine, "_graphs", None), clock.timing(stages):
        _, generations = decode_all(engine, requests)
    return {stage: clock.seconds[stage] for stage in STAGES}, sum(len(g.token_ids) for g in generations)


class StageClock:
    """Seconds spent in each stage, by wrapping functions from outside. A stage inside another pauses the outer one.

    On a GPU it waits for the device at each change of stage, so that it slows down what it measures: use it for
    shares, not for rates.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def timing(self, stages: Sequence[tuple[Any, str, str]]) -> Iterator[None]:
        """Time `(owner, attribute, stage)`: calls of a method or module function count towards the stage."""
        patches = [patch.object(owner, name, self._timed(getattr(owner, name), stage)) for owner, name, stage in stages]
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._change()
            self._open.append(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self._change()
                self._open.pop()

        return timed

    def _change(self) -> None:
        synchronise(self._device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
