"""The processes of a model that is split: how the other ranks begin, find each other, and end with this one, rank 0."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from drafter.errors import EngineError, LoadError, one_line
from drafter.target_model.loading import pick_device

READY = "ready"  # the first thing that a rank says
_log = logging.getLogger(__name__)
_PATIENCE = 5.0
"""Seconds in which it shows whether a call failed because another rank has ended."""


@dataclass(frozen=True)
class Share:
    """The place of rank `rank` among `size` ranks, each with `threads` threads and a device of this type.

    `store` is a file by which they find each other.
    """

    rank: int
    size: int
    device: str
    store: str
    threads: int

    def join(self) -> None:
        """Meet the other ranks, which have to do so at the same time."""
        torch.set_num_threads(self.threads)
        ranks: dict[str, Any] = {"rank": self.rank, "world_size": self.size, "init_method": f"file://{self.store}"}
        if self.device == "cuda":
            own = torch.device("cuda", self.rank)
            torch.cuda.set_device(own)
            distributed.init_process_group("nccl", device_id=own, **ranks)
            return
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they talk to nobody on another machine
        distributed.init_process_group("gloo", **ranks)


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    connection: Connection

    def said(self) -> str:
        """Wait for what it says, and return that, or how its process has ended."""
        try:
            said, _, trace = self.connection.recv_bytes().decode().partition("\n")
        except (EOFError, OSError):
            code = self.process.wait()
            return f"it was ended by signal {-code}" if code < 0 else f"it ended with code {code}"
        if trace:
            _log.debug(trace)
        return said


@dataclass
class _End:
    """That a rank has ended, and what became of it."""

    known: threading.Event = field(default_factory=threading.Event)
    why: str = ""
    wanted: bool = False  # by `Ranks.close`
    tell: Callable[[EngineError], object] | None = None


class Ranks:
    """The processes of all ranks but rank 0.

    Args:
        size: Number of ranks.
        name: Of the model.
        device: As for `load_base`.
        loading: What else each rank gives `load_base`.

    Raises:
        LoadError: There are fewer GPUs than ranks, or this process is a rank of something else.
    """

    def __init__(self, size: int, name: str, device: str | torch.device, loading: Mapping[str, Any]) -> None:
        kind = _device_type(size, device)
        if distributed.is_initialized():
            raise LoadError(
                "tensor_parallel_size needs torch.distributed for itself, and this process uses it already: close the "
                "other model, or load this one in a process of its own"
            )
        folder = tempfile.TemporaryDirectory(prefix="drafter-ranks-")
        own = Share(0, size, kind, str(Path(folder.name, "store")), max(1, torch.get_num_threads() // size))
        shares = [replace(own, rank=rank) for rank in range(1, size)]
        self._end, self._ranks = _End(), list[_Rank]()
        self.close = weakref.finalize(self, _finish, self._ranks, self._end, folder)
        """End the other ranks. It happens at the latest when this object goes, or the process ends."""
        self._ranks += map(_started, shares)
        for share, rank in zip(shares, self._ranks, strict=True):
            with suppress(OSError):  # it has ended, which is noticed below
                rank.connection.send_bytes(pickle.dumps((share, name, dict(loading))))
        for rank in self._ranks:
            if (why := rank.said()) != READY:
                self.close()
                raise LoadError(f"a process of tensor_parallel_size {size} has not started: {why}")
        threading.Thread(target=_watch, args=(self._ranks, self._end), name="ranks", daemon=True).start()
        own.join()

    def send(self, content: bytes) -> None:
        """Send all other ranks the same."""
        for rank in self._ranks:
            rank.connection.send_bytes(content)

    def failure(self, error: BaseException) -> EngineError:
        """Return why a call that all ranks do together failed here with `error`: as another one has ended, or so."""
        if self._end.known.wait(_PATIENCE):
            return EngineError(self._end.why)
        return EngineError(f"rank 0 failed in a step of all ranks: {type(error).__name__}: {one_line(error)}")

    def on_end(self, tell: Callable[[EngineError], object]) -> None:
        """Call `tell` from a thread when another rank ends by itself: this one may wait for it, or do nothing."""
        self._end.tell = tell
        if self._end.known.is_set():
            tell(EngineError(self._end.why))


def _device_type(size: int, device: str | torch.device) -> str:
    target, there = pick_device(device), torch.accelerator.current_accelerator()
    # transformers takes the GPUs where there are some.
    if target.type != ("cpu" if there is None else there.type) or (target.type != "cpu" and target.index is not None):
        raise LoadError(
            f"device {device}: tensor_parallel_size {size} takes {size} GPUs, or the CPU where there is none: use auto"
        )
    if target.type == "cuda" and (found := torch.cuda.device_count()) < size:
        raise LoadError(f"tensor_parallel_size {size} takes as many GPUs, and this process has {found}")
    return target.type


def _started(share: Share) -> _Rank:
    ours, theirs = Pipe()
    own = {"LOCAL_RANK": str(share.rank), "TRANSFORMERS_VERBOSITY": "error"}  # rank 0 says the same
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", f"from drafter.ranks.follower import main; main({theirs.fileno()})"]
    with theirs:
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for rank 0, which may go on
        )
    return _Rank(process, ours)


def _watch(ranks: list[_Rank], end: _End) -> None:
    (first, *_) = wait([rank.connection for rank in ranks])
    place = next(place for place, rank in enumerate(ranks) if rank.connection is first)
    end.why = f"rank {place + 1} of the {len(ranks) + 1} of the model has ended: {ranks[place].said()}"
    end.known.set()
    if not end.wanted and end.tell is not None:
        end.tell(EngineError(end.why))


def _finish(ranks: list[_Rank], end: _End, folder: tempfile.TemporaryDirectory[str]) -> None:
    end.wanted = True
    for rank in ranks:
        assert rank.process.stdin is not None
        rank.process.stdin.close()  # at which it ends, whatever it waits for
    for rank in ranks:
        try:
            rank.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    folder.cleanup()
