"""Compiles the library for this machine's processor, once; later processes find it in the cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent / "source"
_FLAGS = ("-std=c++17", "-O2", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Wextra")
_COMPILERS = ("c++", "g++", "clang++")
_PATIENCE = 300.0
"""Seconds that the compiler may take."""


class BuildError(Exception):
    """The library cannot be compiled here; the message says why."""


def library_path() -> Path:
    """Return the compiled library, after compiling it if the cache does not have it.

    The cache is `drafter` in `$XDG_CACHE_HOME`, or in `~/.cache`.

    Raises:
        BuildError: There is no compiler, it fails, or the cache cannot be written to.
    """
    compiler = _compiler()
    cached = cache_folder() / f"native-{_digest(compiler)}.so"
    if not cached.is_file():
        _compile(compiler, cached)
    return cached


def _compiler() -> str:
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise BuildError(f"there is no C++ compiler ({', '.join(wanted)})")


def cache_folder() -> Path:
    """Return the folder of what this machine keeps between processes."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafter"


def _digest(compiler: str) -> str:
    """16 hex digits of all that decides what the compiler makes: the sources, itself, its flags and the processor."""
    digest = hashlib.sha256(" ".join([compiler, *_FLAGS, processor()]).encode())
    digest.update(str(Path(compiler).resolve().stat().st_mtime_ns).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def processor() -> str:
    """Return a description that differs for processors with different instructions under `-march=native`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, target: Path) -> None:
    # PyTorch's own OpenMP, so that the process has one: its file has the name that the linker looks for.
    libraries = Path(torch.__file__).parent / "lib"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            sources = [str(source) for source in sorted(_SOURCES.glob("*.cpp"))]
            command = [compiler, *_FLAGS, *sources, f"-L{libraries}", "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
            if done.returncode != 0:
                raise BuildError(f"{compiler} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
            made.replace(target)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {_PATIENCE:.0f} s") from error
    except OSError as error:
        raise BuildError(f"the compiled library cannot be kept in {target.parent}: {error}") from error


def main() -> None:
    """Compile in advance, and say where the library is, or why there is none."""
    try:
        print(f"native library: {library_path()}")
    except BuildError as error:
        print(f"no native library: {error}")


if __name__ == "__main__":
    main()
