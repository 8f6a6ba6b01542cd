"""Lease on an output, so that one submission works on it at a time.

It saves work only: two submissions of one job would write the same rows under the same names. Object stores have no
locks, so the lease is a file that its holder changes every few seconds. The holder's life is judged by watching the
file, never by comparing clocks.
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

from pipeline.errors import InputError
from pipeline.io.files import Location, partials_of

BEAT_SECONDS = 5.0
_PATIENCE_BEATS = 3  # without a change of the file the holder counts as dead


@dataclass(frozen=True)
class Holder:
    name: str
    host: str
    pid: int
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def known_dead(self) -> bool:
        """True if it ran on this host and has ended. A live process with its id may be another, and proves nothing."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False


class Lease:
    """A lease, held for a `with` block, which raises `InputError` if another submission works on the output.

    `lost` is called from another thread if another submission takes it.
    """

    def __init__(self, file: Location, lost: Callable[[Holder], None], beat_seconds: float = BEAT_SECONDS) -> None:
        self._file, self._lost, self._seconds = file, lost, beat_seconds
        self._me = Holder(uuid.uuid4().hex, socket.gethostname(), os.getpid())
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        held = self._read()
        if held is not None and not held.known_dead:
            deadline = time.monotonic() + _PATIENCE_BEATS * self._seconds
            while time.monotonic() < deadline:
                time.sleep(self._seconds / 5)
                self._refuse_unless(self._read() in (held, None), held)
        self._write()
        # Of two simultaneous writers, both see the last one.
        time.sleep(self._seconds / 25)
        now = self._read()
        self._refuse_unless(now is not None and now.name == self._me.name, now or self._me)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        held = self._read()
        if held is not None and held.name == self._me.name:
            for partial in partials_of(self._file):  # of dead submissions: others write nothing while this one does
                partial.delete()
            self._file.filesystem.delete_file(self._file.path)

    @property
    def is_left(self) -> bool:
        """True if a submission works on the output, or has ended without releasing the lease."""
        return self._file.exists or bool(partials_of(self._file))

    def _refuse_unless(self, free: bool, holder: Holder) -> None:
        if not free:
            output = self._file.parent.path
            raise InputError(f"another submission works on output {output} ({holder}): wait for its end, or stop it")

    def _run(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                held = self._read()
                if held is not None and held.name != self._me.name:
                    self._lost(held)
                    return
                self._write()
            except OSError:
                continue  # the next sign of life makes up for one that failed

    def _read(self) -> Holder | None:
        try:
            return Holder(**json.loads(self._file.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None  # there is none, or it is no lease

    def _write(self) -> None:
        self._me = replace(self._me, beat=self._me.beat + 1)
        self._file.write_text(json.dumps(asdict(self._me)))
