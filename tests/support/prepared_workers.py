"""Ray workers that begin with their imports done, because importing torch and transformers takes each ten seconds.

A job of the tests has a dozen worker processes, and a run of the tests has hundreds. `prepared_workers` starts one
process that imports what they need and then forks itself for each worker that Ray asks for. The workers are Ray's own:
they run its script with its arguments and environment, and die as others do. They import Ray and our own modules
themselves: Ray reads its settings from the environment meanwhile, and draws the random numbers that become its ids.

Ray starts workers by the `sys.executable` of the process that starts a node. A small script takes its place, which
passes arguments, environment and output on to the process that forks. Whatever is not a worker is run by Python itself.
In other processes it takes its place by a `sitecustomize` module, which Python imports at its start.
"""

from __future__ import annotations

import array
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

_WORKER = "default_worker.py"
_CONTEXT = "--serialized-runtime-env-context="
_LONG = "-" * 200
"""An argument that leaves room for the titles that Ray gives its workers."""

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
    sys.exit(0 if asked.recv(1) else "no worker was forked")
os.execv({python!r}, [{python!r}, *arguments])
"""


@dataclass
class PreparedWorkers:
    """A process that forks workers.

    Args:
        python: The `sys.executable` with which a node is to be started so that its workers are forked.
        environment: Environment variables of a process whose nodes' workers are to be forked.
        pid: The process, which is the workers' parent.
    """

    python: str
    environment: dict[str, str]
    pid: int


@contextmanager
def prepared_workers() -> Iterator[PreparedWorkers]:
    """Fork workers as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        address, script = Path(folder) / "workers", Path(folder) / "python"
        script.write_text(_SCRIPT.format(python=sys.executable, address=str(address), worker=_WORKER))
        script.chmod(0o700)
        (Path(folder) / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(script)!r}\n")
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        listening.bind(str(address))
        listening.listen(64)
        forking = subprocess.Popen(
            [sys.executable, "-m", "tests.support.prepared_workers", str(listening.fileno()), _LONG],
            stdin=subprocess.PIPE,  # it ends with this pipe, which is also when this process is killed
            pass_fds=[listening.fileno()],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # threads are not forked
        )
        listening.close()
        try:
            yield PreparedWorkers(str(script), {"PYTHONPATH": path}, forking.pid)
        finally:
            assert forking.stdin is not None
            forking.stdin.close()
            forking.wait()


@contextmanager
def driver(*arguments: Any, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run Python with these arguments, and Ray's workers prepared; it is killed at the end of the context.

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


@dataclass
class _Worker:
    """Command line, environment and folder of a worker that Ray starts; `files` are its standard output and error."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]


def _import_what_takes_long() -> None:
    import pandas  # noqa: F401
    import pyarrow.dataset  # noqa: F401
    import torch  # noqa: F401
    import transformers.modeling_utils  # noqa: F401


def _serve(listening: socket.socket) -> None:
    """Fork a worker for whoever asks, until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers: Ray watches their sockets
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        asked, _ = listening.accept()
        with asked:
            worker = _receive(asked)
            if worker is None:  # whoever asked was killed meanwhile
                continue
            gc.freeze()  # to look through what was imported takes a worker half a second each time
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _be_a_worker(asked, worker)
            for file in worker.files:
                os.close(file)


def _receive(asked: socket.socket) -> _Worker | None:
    size, ancillary, _, _ = asked.recvmsg(8, socket.CMSG_SPACE(8))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        more = asked.recv(1 << 20)
        if not more:
            break
        text += more
    else:
        if text:
            arguments, environment, folder = json.loads(text)
            return _Worker(arguments, environment, folder, list(files))
    for file in files:
        os.close(file)
    return None


def _be_a_worker(asked: socket.socket, worker: _Worker) -> None:
    """Become it; never returns."""
    os.environ.clear()
    os.environ.update(worker.environment)
    os.chdir(worker.folder)
    os.setsid()
    for target, file in enumerate([os.open(os.devnull, os.O_RDONLY), *worker.files]):
        os.dup2(file, target)
        os.close(file)
    asked.sendall(b"1")
    asked.close()
    # What Ray's own first script does: it reads two of the arguments, and has a shell run the rest.
    own = [argument for argument in worker.arguments if argument.startswith((_CONTEXT, "--language="))]
    context: dict[str, Any] = {}
    for argument in own:
        if argument.startswith(_CONTEXT):
            context = json.loads(argument.removeprefix(_CONTEXT))
    match context.get("command_prefix") or []:
        case []:
            pass
        case ["cd", folder, "&&"]:
            os.chdir(*shlex.split(folder))
        case _:
            os.execv(sys.executable, [sys.executable, *worker.arguments])
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = os.path.expandvars(value)
    sys.argv = [argument for argument in worker.arguments if argument not in own]
    while not sys.argv[0].endswith(_WORKER):
        del sys.argv[0]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *filter(None, paths)]  # in place of this module's own folder
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise SystemExit(0)


if __name__ == "__main__":
    _import_what_takes_long()
    _serve(socket.socket(fileno=int(sys.argv[1])))
