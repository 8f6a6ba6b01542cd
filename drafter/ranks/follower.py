"""A rank beside rank 0: a process that loads its part of a model, and does with it what rank 0 does with its own."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from drafter import devices
from drafter.errors import EngineError, one_line
from drafter.images.loading import Eyes
from drafter.ranks.messages import EMBEDDING, FIRST_CACHE, HEAD, MODEL, Place, Witness, receive
from drafter.ranks.processes import READY, Share
from drafter.target_model.cache import TargetCache
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel


def main(descriptor: int) -> None:
    """Load what the first message of this connection says, and follow rank 0 until the process ends."""
    # Rank 0 keeps the other end of stdin open for as long as it lives, and a rank may wait for it for ever otherwise.
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    connection = Connection(descriptor)
    try:
        share, name, loading = pickle.loads(connection.recv_bytes())
        assert isinstance(share, Share)
        connection.send_bytes(READY.encode())
        share.join()
        base = load_base(name, eyes=Eyes(), ranks=share.size, **loading)
        Follower(base, share.rank).follow(connection.recv_bytes)
    except Exception as error:
        said = one_line(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {one_line(error)}"
        with suppress(OSError):
            connection.send_bytes(f"{said}\n{traceback.format_exc()}".encode())
        os._exit(1)


def _end_with_rank_0() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


class Follower:
    """Does what rank 0 says with this rank's part of a model."""

    def __init__(self, base: BaseModel, rank: int) -> None:
        self._rank, self._device, self._numbers = rank, base.device, count(FIRST_CACHE)
        head, embedding = base.model.get_output_embeddings(), base.model.get_input_embeddings()
        self._objects: dict[int, Any] = {MODEL: base, EMBEDDING: embedding, HEAD: head}
        self._witness = Witness(head)
        self._compared = deque[tuple[Tensor, Any]]()  # whether checksums differ, and when that is known

    @torch.inference_mode()
    def follow(self, read: Callable[[], bytes]) -> None:
        """Do the calls of each message that `read` returns, for ever.

        Raises:
            EngineError: This rank's numbers are not those of rank 0.
        """
        while True:
            message = receive(read(), self._find, self._device)
            self._compare(message.checksum)
            for call in message.calls:
                asked = getattr(self._find(call.target), call.name)
                found = asked if call.args is None else asked(*call.args, **call.kwargs)
                if isinstance(found, TargetCache):
                    self._objects[next(self._numbers)] = found

    def _find(self, place: Place) -> Any:
        found = self._objects[place.number]
        return getattr(found, place.attribute) if place.attribute else found

    def _compare(self, checksum: Tensor | None) -> None:
        """Compare rank 0's checksum with this rank's; on a GPU the answer is read when it is there."""
        own = self._witness.checksum
        if checksum is not None:
            differs = torch.ones((), dtype=torch.bool) if own is None else checksum != own
            self._compared.append(devices.fetch(differs))
        while self._compared and (self._compared[0][1] is None or self._compared[0][1].query()):
            if bool(self._compared.popleft()[0]):
                raise EngineError(
                    f"rank {self._rank} has computed other numbers than rank 0 of the same texts: a fault of the "
                    "hardware, or versions of libraries that differ"
                )
