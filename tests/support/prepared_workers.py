"""Ray workers that begin with their imports done, because importing torch, transformers and Ray takes eleven seconds.

A job of the tests has a dozen worker processes, and a run of the tests has hundreds. One process imports torch and
what else is slow. For each set of Ray's own settings it forks one that imports Ray and our modules, and that one forks
itself for each worker that Ray asks for. The workers are Ray's own: they run its script with its arguments and
environment, and die as others do.

Two properties of Ray need care. It reads its settings (`RAY_*`) from the environment while it is imported, hence a
process for each set of them. It draws random numbers meanwhile, which every forked process would draw again, and its
ids are such numbers: here they come from the operating system.

Ray starts workers by the `sys.executable` of the process that starts a node. A small script takes its place, which
passes arguments, environment and output on to the process that forks. Whatever is not a worker is run by Python itself.
In other processes it takes its place by a `sitecustomize` module, which Python imports at its start.

What does confined work (`drafter.confined`), in tests' own processes and in Ray's workers, is forked by it, too.
"""

from __future__ import annotations

import array
import atexit
import gc
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn
from unittest import mock
from weakref import finalize

import psutil

from drafter import confined
from tests.support.jitter import jitter
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE

_WORKER = "default_worker.py"
_CONTEXT = "--serialized-runtime-env-context="
_CONFINED = "confined"
"""The argument of a process for confined work; the others are Python's path."""
_LONG = "-" * 200
"""An argument that leaves room for the titles that Ray gives its workers."""
_SLOW = (
    "pandas",
    "pyarrow.dataset",
    "torch",
    "drafter.llm",
    "transformers.models.auto",
    "fastapi",
    "aiohttp",
    "uvicorn",
)
_WITH_RAY = ("ray.data", "ray.serve", "ray.train.torch", "pipeline.engines.engine_actor")
_READ_LATER = {"RAY_ADDRESS", "RAY_TMPDIR"}
"""Variables that Ray reads when it connects, not when it is imported."""

_SCRIPT = """#!{python} -IS
import array, json, os, socket, sys
arguments = sys.argv[1:]
if any(argument.endswith({worker!r}) for argument in arguments):
    asked = socket.socket(socket.AF_UNIX)
    asked.connect({address!r})
    text = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
    files = array.array("i", [1, 2])
    asked.sendmsg([len(text).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    asked.sendall(text)
    pid = asked.recv(64).decode()
    if not pid:
        sys.exit("no worker was forked")
    with open({pids!r}, "a") as file:
        file.write(pid + "\\n")
    sys.exit(0)
os.execv({python!r}, [{python!r}, *arguments])
"""


@dataclass
class PreparedWorkers:
    """How workers are forked instead of started.

    Args:
        python: The `sys.executable` with which a node is to be started so that its workers are forked.
        environment: Environment variables of a process whose nodes' workers are to be forked.
        pids: A file of the workers' process ids, a line each.
    """

    python: str
    environment: dict[str, str]
    pids: Path

    def processes(self) -> list[psutil.Process]:
        """All workers that have been forked and still run, with their children."""
        found = []
        for pid in map(int, self.pids.read_text().split()):
            with suppress(psutil.NoSuchProcess):  # it may end at any time
                worker = psutil.Process(pid)
                found += [worker, *worker.children(recursive=True)]
        return found

    def named(self, *names: str) -> list[psutil.Process]:
        """Those of them that Ray has given a title with one of the names, such as an actor's class."""
        found = []
        for pid in map(int, self.pids.read_text().split()):
            with suppress(psutil.NoSuchProcess):
                worker = psutil.Process(pid)
                if any(name in " ".join(worker.cmdline()[:1]) for name in names):
                    found.append(worker)
        return found


@contextmanager
def prepared_workers() -> Iterator[PreparedWorkers]:
    """Fork workers as long as the context lasts."""
    address = _forking_process()
    with tempfile.TemporaryDirectory() as folder:
        script, pids = Path(folder) / "python", Path(folder) / "pids"
        pids.touch()
        script.write_text(
            _SCRIPT.format(python=sys.executable, address=str(address), worker=_WORKER, pids=str(pids)),
        )
        script.chmod(0o700)
        (Path(folder) / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(script)!r}\n")
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        yield PreparedWorkers(str(script), {"PYTHONPATH": path}, pids)


@cache
def _forking_process() -> Path:
    """Start the process that forks, once for this process and until it ends; return its socket's address."""
    address = Path(tempfile.mkdtemp()) / "workers"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen(64)
        forking = subprocess.Popen(
            [sys.executable, "-m", "tests.support.prepared_workers", str(listening.fileno()), _LONG],
            stdin=subprocess.PIPE,  # it ends with this pipe, which is also when this process is killed
            pass_fds=[listening.fileno()],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # threads are not forked
        )
    atexit.register(_end, forking, address)
    return address


def _end(forking: subprocess.Popen[bytes], address: Path) -> None:
    assert forking.stdin is not None
    forking.stdin.close()
    forking.wait()
    shutil.rmtree(address.parent)


@contextmanager
def driver_with_a_cluster(*arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run Python with these arguments and prepared workers of Ray; when the context ends it is killed, and they end.

    To start a cluster takes ten core seconds, so this is for tests that end one.

    Args:
        arguments: Such as `"-m", "jobs.generate"` and the job's own.
        options: What `subprocess.Popen` takes.
    """
    command = [sys.executable, *map(str, arguments)]
    with prepared_workers() as workers:
        job = subprocess.Popen(command, env=os.environ | workers.environment, text=True, **options)
        try:
            yield job
        finally:
            job.kill()
            job.wait()
            psutil.wait_procs(workers.processes(), PATIENCE)  # until then its engines commit what they have


class ForkedPreparation(confined._Prepared):
    """A process prepared for confined work, with its imports done before."""

    address: ClassVar[Path | None] = None  # of the process that forks; None where it is this one's own

    def __init__(self, task: bytes) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as file, socket.socket(socket.AF_UNIX) as asked:
            file.write(task)
            file.seek(0)
            asked.connect(str(self.address or _forking_process()))
            environment = os.environ | confined._ENVIRONMENT
            _Worker([_CONFINED, *sys.path], environment, os.getcwd(), [theirs.fileno(), file.fileno()]).send(asked)
        finalize(self, self.control.close)

    @property
    def alive(self) -> bool:
        return not select.select([self.control], [], [], 0)[0]  # nothing comes but its end


@dataclass
class _Worker:
    """A worker that Ray starts, or a process for confined work.

    Args:
        arguments: Its command line.
        environment: Its environment variables.
        folder: Its working directory.
        files: The socket of the process that asks for it, its standard output and its standard error; for confined
            work, the socket by which it is told what to do, and the task in a file.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]

    @property
    def context(self) -> dict[str, Any]:
        """Return the settings that Ray passes to its own first script."""
        for argument in self.arguments:
            if argument.startswith(_CONTEXT):
                context: dict[str, Any] = json.loads(argument.removeprefix(_CONTEXT))
                return context
        return {}

    @property
    def settings(self) -> dict[str, str]:
        """Ray's own settings, as far as it reads them while it is imported."""
        given = self.environment | {name: str(value) for name, value in (self.context.get("env_vars") or {}).items()}
        return {name: value for name, value in given.items() if name.startswith("RAY_") and name not in _READ_LATER}

    @property
    def has_own_modules(self) -> bool:
        """Whether it may import our modules from another place than we do."""
        places = [self.folder, *shlex.split(" ".join(self.context.get("command_prefix") or []))]
        for environment in (self.environment, self.context.get("env_vars") or {}):
            places += environment.get("PYTHONPATH", "").split(os.pathsep)
        others = [Path(place) for place in places if place.startswith("/") and Path(place).resolve() != ROOT]
        return any((place / name).exists() for place in others for name in ("drafter", "pipeline", "jobs"))

    def send(self, there: socket.socket) -> None:
        text = json.dumps([self.arguments, self.environment, self.folder]).encode()
        files = array.array("i", self.files)
        there.sendmsg([len(text).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        there.sendall(text)

    def close(self) -> None:
        for file in self.files:
            os.close(file)


def _receive(there: socket.socket) -> _Worker | None:
    """Return the worker that is sent, or None if the sender ended before it had sent all."""
    size, ancillary, _, _ = there.recvmsg(8, socket.CMSG_SPACE(12))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    text, left = b"", int.from_bytes(size, "big")
    while left and (more := there.recv(left)):
        text, left = text + more, left - len(more)
    if text and not left:
        arguments, environment, folder = json.loads(text)
        return _Worker(arguments, environment, folder, list(files))
    for file in files:
        os.close(file)
    return None


def _serve(listening: socket.socket) -> None:
    """Have a worker forked for each process that asks, until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers: Ray watches their sockets
    of_settings: dict[tuple[tuple[str, str], ...], socket.socket] = {}
    gc.freeze()  # to look through what was imported takes a worker half a second each time
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        asked, _ = listening.accept()
        worker = _receive(asked)
        if worker is None:  # whoever asked was killed meanwhile
            asked.close()
            continue
        worker.files.insert(0, asked.detach())
        if worker.has_own_modules or worker.arguments[0] == _CONFINED:
            _fork_worker(worker, listening, *of_settings.values())
            continue
        key = tuple(sorted(worker.settings.items()))
        if key not in of_settings:
            _end_those_without_a_node(of_settings)
            of_settings[key], there = socket.socketpair()
            if os.fork() == 0:
                for one in (listening, *of_settings.values()):
                    one.close()
                worker.close()
                _serve_with_ray(there, dict(key))
            there.close()
        worker.send(of_settings[key])
        worker.close()


def _end_those_without_a_node(of_settings: dict[tuple[tuple[str, str], ...], socket.socket]) -> None:
    """End processes that fork workers for nodes that have ended: each has tens of megabytes of its own."""
    for key in list(of_settings):
        node = dict(key).get("RAY_RAYLET_PID")
        if node is not None and not psutil.pid_exists(int(node)):
            of_settings.pop(key).close()


def _serve_with_ray(there: socket.socket, settings: dict[str, str]) -> None:
    """Fork workers that have these settings of Ray; never returns."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(settings)
    _import_with_ray()
    gc.freeze()
    while worker := _receive(there):
        _fork_worker(worker, there)
    os._exit(0)


def _import_with_ray() -> None:
    import ray.actor

    drawn_by_python = SimpleNamespace(from_random=lambda: ray.ActorClassID(os.urandom(ray.ActorClassID.size())))
    with mock.patch("ray.actor.ActorClassID", drawn_by_python):
        for name in _WITH_RAY:
            import_module(name)
    assert _draw() != _draw(), "an import draws one of Ray's random numbers, and all workers would have the same ids"


def _draw() -> bytes:
    """Return what a forked process draws from Ray's random numbers."""
    import ray

    reads, writes = os.pipe()
    if os.fork() == 0:
        os.write(writes, ray.ObjectRef.from_random().binary())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as file:
        return file.read()


def _fork_worker(worker: _Worker, *others: socket.socket) -> None:
    """Fork it; it closes the others' sockets."""
    if os.fork() == 0:
        for one in others:
            one.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if worker.arguments[0] == _CONFINED:
            _be_confined(worker)
        _be_a_worker(worker)
    worker.close()


def _be_confined(worker: _Worker) -> NoReturn:
    asked, control, task = worker.files
    os.close(asked)
    os.environ.clear()
    os.environ.update(worker.environment)
    os.chdir(worker.folder)
    sys.path[:] = worker.arguments[1:]
    os.dup2(task, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    confined._serve(control)


def _be_a_worker(worker: _Worker) -> None:
    """Become it; never returns."""
    os.environ.clear()
    os.environ.update(worker.environment)
    os.chdir(worker.folder)
    os.setsid()
    asked, *outputs = worker.files
    for target, file in enumerate([os.open(os.devnull, os.O_RDONLY), *outputs]):
        os.dup2(file, target)
        os.close(file)
    with socket.socket(fileno=asked) as there:
        there.sendall(str(os.getpid()).encode())
    # What Ray's own first script does: it reads two of the arguments, and has a shell run the rest.
    context = worker.context
    match context.get("command_prefix") or []:
        case []:
            pass
        case ["cd", folder, "&&"]:
            os.chdir(*shlex.split(folder))
        case _:
            os.execv(sys.executable, [sys.executable, *worker.arguments])
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = os.path.expandvars(value)
    sys.argv = [argument for argument in worker.arguments if not argument.startswith((_CONTEXT, "--language="))]
    while not sys.argv[0].endswith(_WORKER):
        del sys.argv[0]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *filter(None, paths)]  # in place of this module's own folder
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise SystemExit(0)


if __name__ == "__main__":
    jitter()
    for slow in _SLOW:
        import_module(slow)
    listening = socket.socket(fileno=int(sys.argv[1]))
    ForkedPreparation.address = Path(listening.getsockname())
    confined._Prepared = ForkedPreparation  # type: ignore[misc]
    _serve(listening)
