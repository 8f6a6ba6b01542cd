"""One submission works on an output at a time.

Nothing that is committed depends on it: two submissions of one job write the same rows under the same names. It saves
the work that a second one would do twice. Object stores have no locks, so it rests on a file that its holder changes
every few seconds; whether the holder lives is seen by watching the file, never by comparing clocks.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import TracebackType

from pyarrow import fs

from pipeline.errors import InputError
from pipeline.io.files import Location

BEAT_SECONDS = 5.0
_PATIENCE = 3
"""A file that stays as it is for so many beats has lost its holder."""


@dataclass(frozen=True)
class Holder:
    """Who works on an output.

    Args:
        name: Unique.
        host: Of its driver.
        pid: Of its driver.
        beat: Changes as long as it lives.
    """

    name: str
    host: str
    pid: int
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def known_dead(self) -> bool:
        """Whether it was on this host and is gone; the pid of another process tells nothing."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


class Lease:
    """Held for a `with` block.

    Args:
        file: Where it is kept.
        lost: Called, from another thread, if another submission has taken it: this one was thought dead.
        beat_seconds: Between its signs of life.
    """

    def __init__(self, file: Location, lost: Callable[[Holder], None], beat_seconds: float = BEAT_SECONDS) -> None:
        self._file, self._lost, self._seconds = file, lost, beat_seconds
        self._me = Holder(uuid.uuid4().hex, socket.gethostname(), os.getpid())
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        """Take it.

        Raises:
            InputError: Another submission is at work.
        """
        held = self._read()
        if held is not None and not held.known_dead:
            deadline = time.monotonic() + _PATIENCE * self._seconds
            while time.monotonic() < deadline:
                time.sleep(self._seconds / 5)
                self._refuse_unless(self._read() in (held, None), held)
        self._write()
        time.sleep(self._seconds / 25)  # who comes in the same moment sees that one of the two is last
        now = self._read()
        self._refuse_unless(now is not None and now.name == self._me.name, now or self._me)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        held = self._read()
        if held is not None and held.name == self._me.name:
            self._file.filesystem.delete_file(self._file.path)

    def _refuse_unless(self, mine: bool, holder: Holder) -> None:
        if not mine:
            raise InputError(
                f"another submission works on output {self._file.path.rpartition('/')[0]} ({holder}): "
                "wait for its end, or stop it"
            )

    def _run(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                held = self._read()
                if held is not None and held.name != self._me.name:
                    self._lost(held)
                    return
                self._write()
            except OSError:
                continue  # a sign of life that fails is made up for by the next

    def _read(self) -> Holder | None:
        if self._file.type != fs.FileType.File:
            return None
        try:
            return Holder(**json.loads(self._file.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None  # given up in this moment, or not a lease

    def _write(self) -> None:
        self._me = replace(self._me, beat=self._me.beat + 1)
        self._file.write_text(json.dumps(asdict(self._me)))
