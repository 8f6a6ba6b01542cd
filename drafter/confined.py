"""Runs work on untrusted input in processes of its own, each with limits on memory and processor time.

One process is *prepared*: it imports and loads what the work needs, which takes seconds, and does none of it. Each
*worker* is a fork of it, which takes milliseconds. A worker does one piece of work after the other, and ends if one
exceeds a limit or crashes: that piece fails, the next one gets another worker, and nobody else notices.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from drafter.errors import one_line

_PAUSES = 5.0
"""A piece of work may take this many times its processor time, and `_START_SECONDS`: the machine may be busy."""
_START_SECONDS = 300.0
_LONGEST_SECONDS = 86_400.0
_LAST_SECONDS = 2.0
_KEPT = 64 << 20  # a worker that holds more than so many bytes after its work ends
_LONGEST_MESSAGE = 64
_NICE = 5  # beside work at this level, a core that others want as well does a quarter of its work for us
_END = b"end"
_ENVIRONMENT = {  # nothing that is forked may have threads, and no worker needs a GPU
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class Bounds:
    """Limits of a piece of work.

    Args:
        memory: Bytes of address space beside those of the prepared process.
        seconds: Processor time.
    """

    memory: int
    seconds: float


class BoundError(Exception):
    """A piece of work exceeded a limit, crashed or was stopped; the message says which, as in "it takes …"."""


class Confined:
    """Does work in processes of its own. Thread-safe; pieces from several threads are done at the same time.

    Nothing is started before `start`, or the first piece of work.

    Args:
        prepare: A function of a module. It is called with `arguments` in the prepared process, and returns the function
            that does the work.

    Attributes:
        seconds: Processor time of all work so far.
    """

    def __init__(self, prepare: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
        self._task = pickle.dumps((prepare, arguments))
        self._lock = threading.Lock()
        self._prepared: _Prepared | None = None
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self.seconds = 0.0

    def start(self) -> None:
        """Start the prepared process, without waiting for it."""
        with self._lock:
            if self._prepared is None or not self._prepared.alive:
                self._prepared, self._idle = _Prepared(self._task), []

    def run(self, *arguments: Any, bounds: Bounds) -> Any:
        """Return what the work makes of `arguments`.

        Raises:
            BoundError: It exceeded a limit, crashed or was stopped.
            Exception: What `prepare` or the work itself has raised.
        """
        self.start()
        with self._lock:
            assert self._prepared is not None
            self._idle = [one for one in self._idle if not one.gone]
            worker = self._idle.pop() if self._idle else _Worker(self._prepared)
            self._busy.add(worker)
        begun, reply = time.monotonic(), None
        try:
            reply = worker.do(arguments, bounds)
        finally:
            with self._lock:
                self._busy.discard(worker)
                # Of a worker that has died nobody knows what it took.
                self.seconds += min(bounds.seconds, time.monotonic() - begun) if reply is None else reply.seconds
                if keep := reply is not None and not reply.spent:
                    self._idle.append(worker)
            if not keep:
                worker.end()
        if isinstance(reply.result, Exception):
            raise reply.result
        return reply.result

    def stop(self) -> None:
        """End all work that is being done, with a `BoundError`."""
        with self._lock:
            busy = list(self._busy)
        for worker in busy:
            worker.end()


class _Prepared:
    def __init__(self, task: bytes) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", f"from {__name__} import _serve; _serve({theirs.fileno()})"]
        with theirs:
            process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
        weakref.finalize(self, _leave, self.control, process)
        self._process = process
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stream:
            stream.write(task)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


def _leave(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()  # by which the process ends its workers, and itself
    try:
        process.wait(_LAST_SECONDS)
    except subprocess.TimeoutExpired:  # it is not prepared yet
        process.kill()
        process.wait()


@dataclass(frozen=True)
class _Reply:
    """What came of a piece of work: a result or an error, and whether the worker ends with it."""

    result: Any
    seconds: float
    spent: bool


class _Worker:
    def __init__(self, prepared: _Prepared) -> None:
        self._prepared, self._ended, self._number = prepared, False, b""
        self._socket, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # of a process that has died no worker answers
            socket.send_fds(prepared.control, [b"new"], [theirs.fileno()])
        self._connection = Connection(os.dup(self._socket.fileno()))

    @property
    def gone(self) -> bool:
        """True if it has ended while it had nothing to do."""
        return self._connection.poll(0)

    def do(self, arguments: Any, bounds: Bounds) -> _Reply:
        what = "it needs a process that cannot be started"
        try:
            if not self._number:
                self._wait(_START_SECONDS)
                self._number = self._connection.recv_bytes()
            what = f"it takes more than {bounds.seconds:g} seconds, or ends the process that does it"
            _send(self._connection, (arguments, bounds))
            self._wait(min(_PAUSES * bounds.seconds + _START_SECONDS, _LONGEST_SECONDS))
            reply: _Reply = _receive(self._connection)
        except (EOFError, OSError) as error:
            raise BoundError("it was stopped" if self._ended else what) from error
        if isinstance(reply.result, MemoryError):
            raise BoundError(f"it takes more than {bounds.memory >> 20} MiB of memory")
        return reply

    def end(self) -> None:
        """End the worker, whatever it does."""
        self._ended = True
        with suppress(OSError):
            self._prepared.control.send(_END + self._number)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # who waits for its reply goes on at once

    def _wait(self, seconds: float) -> None:
        if not self._connection.poll(seconds):
            raise BoundError(f"it takes more than {seconds:.0f} seconds")


# The other side.


def _serve(number: int) -> NoReturn:
    """Prepare, and fork workers until the process that asks for them is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, to all of its processes
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work = _prepare(sys.stdin.buffer.read())
    living: set[int] = set()
    with socket.socket(fileno=number) as control:
        while True:
            message, files, _, _ = socket.recv_fds(control, _LONGEST_MESSAGE, 1)
            while living and (found := os.waitpid(-1, os.WNOHANG)[0]):
                living.discard(found)
            if not message:
                break
            if not message.startswith(_END):
                if (worker := os.fork()) == 0:
                    control.close()
                    _work(files[0], work)
                os.close(files[0])
                living.add(worker)
            elif (worker := int(message[len(_END) :] or 0)) in living:
                os.kill(worker, signal.SIGKILL)
    for worker in living:
        os.kill(worker, signal.SIGKILL)
    os._exit(0)  # threads of libraries may wait for what does not come


def _prepare(task: bytes) -> Callable[..., Any]:
    try:
        prepare, arguments = pickle.loads(task)
        return prepare(*arguments)  # type: ignore[no-any-return]
    except Exception as error:
        found = _that_travels(error)

        def work(*_: Any) -> NoReturn:
            raise found

        return work


def _work(file: int, work: Callable[..., Any]) -> NoReturn:
    """Do one piece of work after the other, until one exceeds the memory or nobody asks for more."""
    space, resident = _pages()
    spent = False
    with suppress(EOFError, OSError), Connection(file) as connection:
        connection.send_bytes(b"%d" % os.getpid())
        while not spent:
            arguments, bounds = _receive(connection)
            begun = time.process_time()
            _limit(resource.RLIMIT_AS, space + bounds.memory)
            _limit(resource.RLIMIT_CPU, int(begun + bounds.seconds) + 1)
            try:
                result = work(*arguments)
            except MemoryError:
                result = MemoryError()
            except Exception as error:
                result = _that_travels(error)
            del arguments
            _limit(resource.RLIMIT_AS, sys.maxsize)
            spent = isinstance(result, MemoryError) or _pages()[1] - resident > _KEPT
            _send(connection, _Reply(result, time.process_time() - begun, spent))
    os._exit(0)


def _limit(kind: int, most: int) -> None:
    _, highest = resource.getrlimit(kind)
    own = most if highest == resource.RLIM_INFINITY else min(most, highest)
    resource.setrlimit(kind, (resource.RLIM_INFINITY if own >= sys.maxsize else own, highest))


def _pages() -> tuple[int, int]:
    """Return the bytes of this process's address space, and those of them that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        space, resident = stream.read().split()[:2]
    return int(space) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _that_travels(error: Exception) -> Exception:
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:  # some errors need more than their message to be made again
        return RuntimeError(one_line(error))


def _send(connection: Connection, value: Any) -> None:
    """Send a value; arrays in it are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    parts: list[bytes | memoryview] = [pickle.dumps(value, 5, buffer_callback=buffers.append)]
    parts += [buffer.raw() for buffer in buffers]
    connection.send_bytes(pickle.dumps([len(part) for part in parts]))
    for part in parts:
        connection.send_bytes(part)


def _receive(connection: Connection) -> Any:
    parts = []
    for size in pickle.loads(connection.recv_bytes()):
        parts.append(bytearray(size))
        connection.recv_bytes_into(parts[-1])
    return pickle.loads(parts[0], buffers=parts[1:])
