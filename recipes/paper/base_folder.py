"""The stage `base`: the base in a folder that the jobs load, with safetensors and a chat template.

Vicuna is published as pickled shards without a chat template. The shards are read by PyTorch's restricted loader
(`drafter.heads.unpickle`).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafter.errors import LoadError, one_line
from drafter.heads.unpickle import convert_file
from drafter.text.tokenizers import load_tokenizer
from pipeline.errors import InputError, JobError
from recipes.paper.paper_config import HERE, RANDOM, SMOLLM2, BaseConfig

_ORIGIN = "base.json"
"""File of a finished folder that says what it was made from."""
_INDEX = "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model*.bin", "pytorch_model.bin.index.json"
_WANTED = ["*.json", "tokenizer*", "*.jinja", "*.safetensors", _PICKLED]


def prepare_base(base: BaseConfig, folder: Path) -> None:
    """Make the base's folder, unless it is there. It appears when it is complete.

    Args:
        base: The base.
        folder: A new folder, or that of an earlier run.

    Raises:
        InputError: The folder is of another base, there is no such base, or it has other sizes.
        JobError: It cannot be fetched or written.
    """
    origin = folder / _ORIGIN
    if folder.exists():
        if not origin.exists() or json.loads(origin.read_text(encoding="utf-8")) != asdict(base):
            raise InputError(f"{folder} holds another base: choose another output, or remove that folder")
        print(f"{base.name} is in {folder}", flush=True)
        return
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if base.source == SMOLLM2:
            from recipes.smollm2.__main__ import cache_folder
            from recipes.smollm2.fetch import fetch

            fetch(cache_folder())
            check_sizes(base, cache_folder())
            shutil.copytree(cache_folder(), temporary, dirs_exist_ok=True)
        else:
            published = _published(base, temporary.with_name(f"{folder.name}.source"))
            check_sizes(base, published)  # before all shards are converted, which takes long
            convert(published, temporary)
        (temporary / _ORIGIN).write_text(json.dumps(asdict(base), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise JobError(f"the base cannot be made in {temporary}: {one_line(error)}") from error
    temporary.rename(folder)
    print(f"{base.name} is in {folder}", flush=True)


def _published(base: BaseConfig, beside: Path) -> Path:
    """Return a folder with the base as it is published.

    Args:
        base: The base.
        beside: Where a random one is made.

    Raises:
        InputError: There is no such base.
    """
    if base.source == RANDOM:
        from recipes.paper.random_vicuna import write_random_vicuna

        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        write_random_vicuna(beside, base)
        return beside
    if (local := Path(base.source).expanduser()).is_dir():
        return local
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(base.source, allow_patterns=_WANTED))
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"base.source {base.source} is no folder, and as a hub id: {one_line(error)} (give a folder, or a hub id "
            "that the cluster's head can reach)"
        ) from error


def convert(published: Path, folder: Path) -> None:
    """Write a published base as safetensors, with its tokeniser and, where it has none, Vicuna's chat template.

    Args:
        published: The base as it is published.
        folder: Where it goes: an empty folder.

    Raises:
        InputError: It has no weights, or files of it cannot be read.
    """
    for name in ("config.json", "generation_config.json"):
        if (published / name).is_file():
            shutil.copyfile(published / name, folder / name)
    if any(published.glob("*.safetensors")):
        for file in [*published.glob("*.safetensors"), *published.glob(_INDEX)]:
            shutil.copyfile(file, folder / file.name)
    else:
        _unpickle(published, folder)
    try:
        tokenizer = load_tokenizer(published)
    except LoadError as error:
        raise InputError(str(error)) from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template = (HERE / "vicuna_template.jinja").read_text(encoding="utf-8").removesuffix("\n")
    tokenizer.save_pretrained(folder)


def _unpickle(published: Path, folder: Path) -> None:
    """Convert each pickled shard, and write the index of the converted ones."""
    pickles = sorted(published.glob(_PICKLED))
    if not pickles:
        raise InputError(f"the base at {published} has neither *.safetensors nor {_PICKLED}: give another base.source")
    names = {file.name: _converted(file.name, len(pickles)) for file in pickles}
    for file in pickles:
        print(f"converting {file.name}", flush=True)
        try:
            convert_file(file, folder / names[file.name])
        except ValueError as error:
            raise InputError(f"the base at {published}: {one_line(error)}") from error
    if len(pickles) > 1:
        try:
            index: dict[str, Any] = json.loads((published / _PICKLED_INDEX).read_text(encoding="utf-8"))
            index["weight_map"] = {tensor: names[file] for tensor, file in index["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{published / _PICKLED_INDEX} cannot be used: {one_line(error)}") from error
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _converted(name: str, shards: int) -> str:
    """Return a shard's name as transformers looks for it."""
    if shards == 1:
        return "model.safetensors"
    return name.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"


def check_sizes(base: BaseConfig, folder: Path) -> None:
    """Compare a base with what the configuration says of it.

    Raises:
        InputError: A size is another one, or the base does not say its sizes.
    """
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"the base at {base.source} has no config.json that can be read: {one_line(error)}; give another "
            "base.source"
        ) from error
    heads = found.get("num_attention_heads")
    sizes = {
        "layers": found.get("num_hidden_layers"),
        "width": found.get("hidden_size"),
        "intermediate": found.get("intermediate_size"),
        "heads": heads,
        "kv_heads": found.get("num_key_value_heads") or heads,
        "vocabulary": found.get("vocab_size"),
    }
    for name, size in sizes.items():
        if size != getattr(base, name):
            raise InputError(f"base.{name} is {getattr(base, name)}, but the base at {base.source} has {size}")
