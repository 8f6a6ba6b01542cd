"""Models of a job: fingerprints, computed without loading them, and what an engine's process loads."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.acceptance.settings import VerifierSettings
from drafter.drafters.names import check_name, kind_and_rest, leaf_names
from drafter.embedded import EMBEDDED_HEADS
from drafter.engine.config import EngineConfig, EngineSettings
from drafter.errors import LoadError, one_line
from drafter.gguf_files import gguf_file, pretrained
from drafter.gguf_files import tensor_spans as gguf_spans
from drafter.plugins import registered
from drafter.requests import GENERATION_FILE, read_generation_file
from pipeline.cluster.model_copies import model_name
from pipeline.command_line import say
from pipeline.errors import InputError
from pipeline.io.files import batches
from pipeline.settings import LoadingConfig

if TYPE_CHECKING:  # a driver makes the specification of an engine, and loads nothing
    from drafter.llm import SpeculativeLM
    from drafter.methods.learning.settings import StartingHead
    from pipeline.learning.config import Beginning

_SUFFIXES = (".json", ".jinja", ".safetensors", ".model", ".txt", ".py")
# The only nested files that transformers reads. A model with weights in a subfolder is refused at load.
_TEMPLATES = "additional_chat_templates/*"
_WHOLE_BYTES = 256 << 20  # files up to this size are hashed completely, which takes a fraction of a second
_BLOCK, _EVERY = 4 << 10, 1 << 20  # of each tensor of a larger file, a block of every 1 MiB is hashed
_READERS = 16
_BLOCKS_AT_ONCE = 256
_LENGTH_BYTES = 8  # of the header's size, at the beginning of a safetensors file

Span = tuple[int, int]  # the first byte and the one after the last


def folder_fingerprint(folder: Path) -> str:
    """Return `v2-` and 16 hex digits: a hash of the names, sizes and contents of a model folder's files.

    Weight files above `_WHOLE_BYTES` are sampled; every tensor takes part.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.iterdir(), *folder.glob(_TEMPLATES)]):
        if path.suffix in _SUFFIXES and path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            digest.update(_digest(path))
    return f"v2-{digest.hexdigest()[:16]}"


def file_fingerprint(file: Path) -> str:
    """Return `v2-` and 16 hex digits for a file's content; a large one is sampled like a model's."""
    return f"v2-{hashlib.sha256(_digest(file)).hexdigest()[:16]}"


def tensor_spans(file: Any, size: int) -> list[Span]:
    """Return the byte ranges of the tensors in a stream of safetensors, or raise `ValueError` if it is damaged."""
    begin = _LENGTH_BYTES + int.from_bytes(bytes(file.read(_LENGTH_BYTES)), "little")
    if not _LENGTH_BYTES < begin <= size:
        raise ValueError("its header is incomplete")
    header = json.loads(bytes(file.read(begin - _LENGTH_BYTES)))
    try:
        places = [one["data_offsets"] for name, one in header.items() if name != "__metadata__"]
        spans = sorted((begin + first, begin + end) for first, end in places)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("its header is not that of safetensors") from error
    if max((end for _, end in spans), default=begin) != size:
        raise ValueError(f"it has {size} bytes, and its header says otherwise")
    return spans


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        try:
            spans = gguf_spans(path) if path.suffix == ".gguf" else tensor_spans(file, size)
        except ValueError:  # the loader will report it; until then it is hashed like any file
            spans = []
        header = spans[0][0] if spans else 0
        digest = hashlib.sha256(os.pread(file.fileno(), header, 0))
        blocks = (
            (place, min(place + _BLOCK, end))
            for begin, end in spans or [(0, size)]
            for place in range(begin, end, _EVERY)
        )

        def read(group: list[Span]) -> bytes:
            return b"".join(os.pread(file.fileno(), end - begin, begin) for begin, end in group)

        with ThreadPoolExecutor(_READERS) as pool:
            for content in pool.map(read, batches(blocks, lambda _: 1, _BLOCKS_AT_ONCE)):
                digest.update(content)
        return digest.digest()


_PATH_BEGINNINGS = ("/", "./", "../", "~")
_CONFIG = "config.json"


def longest_request(name: str, most: int, *, trust_remote_code: bool) -> int:
    """Return the most tokens of prompt and output, of at most `most`, that a target model has positions for."""
    from transformers import AutoConfig

    from drafter.target_model.architecture import max_positions

    source, settings = pretrained(os.path.expanduser(name))
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **settings)
    config = config.get_text_config(decoder=True)
    return min(most, max_positions(config) or most)


def model_fingerprint(name: str) -> str:
    """Return a target model's identity, or raise `InputError`: its files' fingerprint, or its hub id and commit."""
    try:
        file = gguf_file(name)
    except LoadError as error:
        raise InputError(str(error)) from error
    return file_fingerprint(file) if file else _fingerprint("model", name, Path(name).expanduser(), "a model")


def adapter_fingerprint(name: str) -> str:
    """Return an adapter's identity as `model_fingerprint` does, or raise `InputError`."""
    return _fingerprint("adapter", name, Path(name).expanduser(), "an adapter", "adapter_config.json")


def head_fingerprint(name: str) -> str:
    """Return a draft head's identity, by its folder or hub id, as `model_fingerprint` does, or raise `InputError`."""
    return _fingerprint("drafter", name, Path(name).expanduser(), "a draft head")


def _fingerprint(what: str, name: str, folder: Path, content: str, config: str = _CONFIG) -> str:
    if folder.is_dir():
        if not (folder / config).is_file():
            raise InputError(f"{what} {name} is not {content}'s folder: it has no {config}")
        return folder_fingerprint(folder)
    if folder.exists() or name.startswith(_PATH_BEGINNINGS) or name.count("/") > 1:
        raise InputError(f"{what} {name} is not a folder with {content}")
    return _on_hub(what, name, config)


def generation_settings(name: str) -> dict[str, Any]:
    """Return a known model's `generation_config.json`; empty if it has none. `InputError` if it cannot be read."""
    folder = Path(name).expanduser()
    if gguf_file(name) is not None:
        return {}
    if not folder.is_dir():
        from drafter.hub import hub_file  # as in `_on_hub`

        try:
            folder = hub_file(name, GENERATION_FILE).parent
        except (OSError, ValueError, RuntimeError):  # most likely the model has no such file
            return {}
    try:
        return read_generation_file(folder, name)
    except LoadError as error:
        raise InputError(str(error)) from error


def head_fingerprints(model: str | None, drafter: str) -> dict[str, str]:
    """Return the fingerprints of the heads, draft models and tables in `drafter`, by name, or raise `InputError`."""
    if drafter == "auto" and model is None:
        drafter = "ctc"
    found, models, files = {}, registered("models"), registered("files")
    for name in leaf_names(drafter):
        try:
            check_name(name)
        except LoadError as error:
            raise InputError(str(error)) from error
        kind, rest = kind_and_rest(name)
        if kind in models:
            found[name] = model_fingerprint(models[kind](rest))
            continue
        if kind in files:
            file = Path(rest).expanduser()
            if not file.is_file():
                raise InputError(f"drafter {name} names no table: there is no file {rest} ({files[kind]})")
            found[name] = file_fingerprint(file)
            continue
        embedded = EMBEDDED_HEADS / name
        folder = embedded if embedded.is_dir() else Path(name).expanduser()
        if folder.exists() or name.startswith("~") or "/" in name:  # other drafters have names without
            found[name] = _fingerprint("drafter", name, folder, "a draft head")
    return found


def verifier_fingerprints(verifier: VerifierSettings) -> dict[str, str]:
    """Return the fingerprints of the folders and files among a verifier's settings, such as a classifier, by name."""
    found = {}
    for name in (value for value in verifier.settings.values() if isinstance(value, str)):
        path = Path(name).expanduser()
        if path.exists():
            found[name] = folder_fingerprint(path) if path.is_dir() else file_fingerprint(path)
    return found


def _on_hub(what: str, name: str, config: str) -> str:
    """Return a hub id with its current commit, or with the cached one if the hub is not asked."""
    from drafter.hub import hub_file, not_found  # most jobs need no hub: import it late

    try:
        file = hub_file(name, config)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{what} {name} is no folder, and as a hub id: {one_line(not_found(error))} (give a folder, or a hub "
            "id that this machine can reach or has in its cache)"
        ) from error
    # The cache keeps each commit's files in a folder of its name.
    return f"{name}@{file.parent.name}"


def enter(folder: str) -> None:
    """Make the driver's working directory this worker's, if it is there, so that relative paths mean the same."""
    with suppress(OSError):
        os.chdir(folder)


def capacity(slots: int) -> int:
    """Return the rows to keep in an engine: enough that no slot is empty between two pulses of its feeder."""
    return slots + max(4, slots // 2)


@dataclass(frozen=True)
class EngineSpec:
    """Models and settings of an engine's process.

    Args:
        model: Hub id or folder; None is the embedded target model.
        loading: Fields of `LoadingConfig`.
        learning: Initial state of a head that learns from the rows; None without learning.
        brought: Draft tokens that a client may bring at once; see `SpeculativeLM.from_pretrained`.
        folder: Working directory of the process that made this, to which relative paths refer.
    """

    model: str | None
    drafter: str
    loading: dict[str, Any]
    config: EngineConfig
    threads: int
    isolated: bool = False
    verifier: VerifierSettings = field(default_factory=VerifierSettings)
    learning: Beginning | None = None
    brought: int = 0
    folder: str = field(default_factory=os.getcwd)

    def load(self, on_stage: Callable[[str], None] | None = None) -> SpeculativeLM:
        """Load the models and start the engine, or raise `LoadError`; see `SpeculativeLM.from_pretrained`."""
        import torch

        torch.set_num_threads(self.threads)
        enter(self.folder)
        if self.learning is None:
            return self._load(None, on_stage)
        with tempfile.TemporaryDirectory(prefix="drafter-head-") as folder:
            start = self.learning.here(folder)
            try:
                return self._load(start, on_stage)
            except LoadError as error:
                if start == self.learning.start:
                    raise
                say(f"the head that was learnt is left out: {one_line(error)}")
                return self._load(self.learning.start, on_stage)

    def _load(self, start: StartingHead | None, on_stage: Callable[[str], None] | None) -> SpeculativeLM:
        from drafter.llm import SpeculativeLM

        drafter, learning = self.drafter, None
        model = self.model if self.model is None else model_name(self.model)  # a bucket's is copied to this machine
        if start is not None:
            from drafter.methods.learning.drafter import Learning

            learning = Learning(start)
            if start.folder is not None and drafter != "auto":
                drafter = start.folder  # the head alone, by where this process has it
        return SpeculativeLM.from_pretrained(
            model,
            drafter,
            config=self.config,
            isolated=self.isolated,
            verifier=self.verifier,
            learning=learning,
            brought=self.brought,
            on_stage=on_stage,
            **self.loading,
        )


def engine_spec(
    model: str | None,
    drafter: str,
    loading: LoadingConfig,
    engine: EngineSettings,
    *,
    queue: int | None = None,
    threads: int = 1,
    **others: Any,
) -> EngineSpec:
    """Return what an engine's process loads, of the settings of a job, a stage or an endpoint.

    `queue` requests may wait in it; by default the rows that a feeder keeps there.
    """
    most = capacity(engine.max_num_seqs) if queue is None else queue
    return EngineSpec(
        model, drafter, asdict(loading), EngineConfig(**asdict(engine), max_queue=most), threads, **others
    )
