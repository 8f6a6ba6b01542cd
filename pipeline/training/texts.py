"""Distilled texts, the output of `drafter distill`: checks, and staging for training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import ray
import torch
from numpy.typing import NDArray
from pyarrow import fs
from ray.data.expressions import col
from torch import Tensor

from drafter.errors import one_line
from drafter.training.targets import RegeneratedText
from pipeline.cluster.ray_cluster import HELPER_CPUS
from pipeline.command_line import say
from pipeline.errors import InputError
from pipeline.io.files import Location, locate, parquet_rows
from pipeline.io.parts import Part
from pipeline.output.columns import PROMPT_IMAGES
from pipeline.output.folder import OutputFolder, read_run
from pipeline.training.config import TrainConfig
from pipeline.training.folder import STAGED_TEXTS_LIST
from pipeline.training.images import FILE, TextImages, prompt_of, text_images

if TYPE_CHECKING:
    from drafter.images.processor import ImageProcessor

COLUMNS = ("request_id", "prompt_token_ids", "token_ids")
_ROWS_WITH_IMAGES = 64  # of a task's batch: what it returns has the files of their images
_PART_IMAGES = 256 << 20  # bytes of the files of images in a part, which a worker reads as a whole
STEPS_PER_PART = 64  # fewest steps of a part. Texts of different parts never come together in a step.
_HELD_OUT, _COUNTS = "held-out", "token-counts"
_USUAL_HELD_OUT = 64
_LARGEST_SHARE = 8  # by default at most one in so many texts is held out
_TEXT = ["tokens", "prompt_length", "images"]
_SCHEMA = pa.schema(
    [
        ("tokens", pa.list_(pa.int32())),
        ("prompt_length", pa.int32()),
        ("key", pa.int64()),
        ("prompt_key", pa.int64()),
        ("problem", pa.string()),
        ("images", pa.list_(pa.large_binary())),
        ("image_bytes", pa.int64()),
        ("unseen", pa.string()),
    ]
)


@dataclass(frozen=True)
class DistilledTexts:
    """The output of one distillation."""

    uri: str
    filesystem: fs.FileSystem
    files: tuple[tuple[str, int], ...]  # path and size of each Parquet file
    base_fingerprint: str
    model: str | None  # the target model that generated them, as that job was given it; None is the embedded one
    model_fingerprint: str  # of its files; see `engines.models`
    images: TextImages | None = None  # where rows may have images

    @property
    def meaning(self) -> dict[str, Any]:
        """Values that differ for other texts."""
        names = [[path.rpartition("/")[2], size] for path, size in self.files]
        return {"base": self.base_fingerprint, "files": hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]}


@dataclass(frozen=True)
class Texts:
    """The distilled texts of a job."""

    data: list[DistilledTexts]
    held_out: DistilledTexts | None  # for β; None if they are some of `data`
    base_fingerprint: str  # of the target model that generated them


def open_texts(uris: Sequence[str], held_out: str | None) -> Texts:
    """Open the outputs of distillations.

    Raises `InputError` if one is not a distillation's, not finished, not lossless, or has no rows, or if different
    models generated them.
    """
    data = [_open(uri) for uri in uris]
    test = None if held_out is None else _open(held_out)
    by_base = {one.base_fingerprint: one.uri for one in (*data, *([test] if test else []))}
    if len(by_base) > 1:
        named = ", ".join(f"{uri} ({base})" for base, uri in by_base.items())
        raise InputError(f"input of different target models cannot be used together: {named}")
    return Texts(data, test, next(iter(by_base)))


def _open(uri: str) -> DistilledTexts:
    output = OutputFolder(locate(uri))
    try:
        run = _read_run(uri, output)
        files = tuple((info.path, info.size) for info in output.data.children() if info.path.endswith(".parquet"))
        found = [_rows(output.data.filesystem, path) for path, _ in files]
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            f"input {uri} cannot be read: {one_line(error)} (submit its distillation again: it makes again what is "
            "damaged)"
        ) from error
    if not sum(rows for rows, _ in found):
        raise InputError(f"input {uri} has no rows: see {output.errors.path} for why none was generated")
    made_by = run["config"].get("model"), str(run["meaning"].get("model"))
    images = text_images(output, run) if any(sees for _, sees in found) else None
    return DistilledTexts(uri, output.data.filesystem, files, run["base_fingerprint"], *made_by, images)


def _read_run(uri: str, output: OutputFolder) -> dict[str, Any]:
    if not output.run_file.exists:
        raise InputError(f"input {uri} is not the output of drafter distill: it has no run.json")
    try:
        run = read_run(output.run_file)
        finished, base = run["state"] == "finished" and "config" in run, run.get("base_fingerprint")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"input {uri} has a damaged run.json: distil again") from error
    if not finished:
        raise InputError(f"input {uri} is not finished: submit its distillation again")
    if not isinstance(base, str):
        raise InputError(f"input {uri} does not say which target model made it: distil again into a new folder")
    if run.get("lossless") is False:
        raise InputError(
            f"input {uri} was decoded by the verifier {run.get('verifier')!r}, which is not lossless: distil again "
            "with the exact one, because a head learns from its own target model's answers"
        )
    return run


def _rows(filesystem: fs.FileSystem, path: str) -> tuple[int, bool]:
    """Return a file's number of rows, and whether these may have images."""
    if parquet_rows(Location(filesystem, path)) is None:
        raise pa.ArrowInvalid(f"{path} is damaged")
    with filesystem.open_input_file(path) as stream:
        file = pa.parquet.ParquetFile(stream)
        schema = file.schema_arrow
        for name in COLUMNS:
            kinds = [field.type for field in schema if field.name == name]
            what = "has no column" if not kinds else "has several columns"
            if len(kinds) == 1:
                if name == "request_id" or (pa.types.is_list(kinds[0]) and pa.types.is_integer(kinds[0].value_type)):
                    continue
                what = f"holds {kinds[0]}, not lists of token ids, in column"
            raise InputError(f"{path} {what} {name!r}: it was not written by drafter distill")
        return int(file.metadata.num_rows), PROMPT_IMAGES in schema.names


# Staging: Parquet parts in a shuffled but deterministic order.


@dataclass(frozen=True)
class TextCounts:
    """Counts of the staged texts."""

    texts: int
    tokens: int
    targets: int  # tokens to train on that the target model generated
    held_out: int
    unusable: int  # rows without a prompt, or an answer within the longest text, or with images that cannot be read
    with_images: int = 0  # of `texts`


@dataclass(frozen=True)
class StagedTexts:
    """The staged texts of a job.

    `folder` holds files of each part and of held-out texts, with columns `tokens`, `prompt_length` and `images` (their
    files, null where there are none), and one of token counts in the answers to train on.
    """

    folder: Location
    parts: tuple[Part, ...]
    counts: TextCounts

    def save(self) -> None:
        """Write the list of parts, which completes the staging."""
        parts = [[part.name, part.rows] for part in self.parts]
        (self.folder / STAGED_TEXTS_LIST).write_text(json.dumps({"parts": parts, "counts": asdict(self.counts)}))

    @classmethod
    def load(cls, folder: Location) -> StagedTexts | None:
        """Return what an earlier submission staged; None if its staging is incomplete or a file is damaged.

        Staging the same texts again gives the same parts.
        """
        try:
            saved = json.loads((folder / STAGED_TEXTS_LIST).read_text())
            parts = tuple(Part(name, rows) for name, rows in saved["parts"])
            counts = TextCounts(**saved["counts"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        rows = {_HELD_OUT: counts.held_out, **{part.name: part.rows for part in parts}}
        if parquet_rows(folder / f"{_COUNTS}.parquet") is None or any(
            parquet_rows(folder / f"{name}.parquet") != count for name, count in rows.items()
        ):
            return None
        return cls(folder, parts, counts)

    def held_out(self, processor: ImageProcessor | None = None) -> list[RegeneratedText]:
        """Read the texts for β; see `text_of`."""
        return [text_of(row, processor) for row in read_part(self.folder, _HELD_OUT).to_pylist()]

    def token_counts(self) -> Tensor:
        """Read the frequency of each token in the answers to train on, `[V]` int64."""
        return torch.tensor(read_part(self.folder, _COUNTS)["count"].to_numpy())

    def coverage(self, tokens: Tensor) -> float:
        """Return the share of the answers' tokens that are among `tokens` `[K]`."""
        counts = self.token_counts()
        return float(counts[tokens.cpu()].sum() / counts.sum())


def text_of(row: Mapping[str, Any], processor: ImageProcessor | None) -> RegeneratedText:
    """Return a row of a staged part as a text; raise `InputError` if it has images, and there is no `processor`."""
    tokens, length, images = row["tokens"], row["prompt_length"], row.get("images")
    if not images:
        return RegeneratedText(tokens, length)
    if processor is None:
        raise InputError("input has texts with images, and the processor of the target model cannot be loaded")
    return RegeneratedText(tokens, length, look=partial(prompt_of, processor, tokens[:length], images))


def read_part(folder: Location, name: str) -> pa.Table:
    return pa.parquet.read_table((folder / f"{name}.parquet").path, filesystem=folder.filesystem)


def stage_texts(texts: Texts, folder: Location, config: TrainConfig, model: str, vocab_size: int) -> StagedTexts:
    """Stage texts on the cluster's workers. Without held-out texts for β, some prompts are held out.

    Rows whose images cannot be read are left out, with a message, and those of held-out prompts. `model` is the target
    model.

    Raises `InputError` if there are token ids beyond the vocabulary, or too few texts.
    """
    texts_per_step = config.training.texts_per_step
    keying = {
        "max_length": config.texts.max_length,
        "vocab_size": vocab_size,
        "seed": config.training.seed,
        "model": model,
        "trust_remote_code": config.trust_remote_code,
    }
    rows = _read(texts.data, keying)
    facts = _table(rows.select_columns(["prompt_key", "image_bytes"])).sort_by("prompt_key")
    prompts, image_bytes = (facts[name].to_numpy() for name in ("prompt_key", "image_bytes"))
    unusable = int(np.count_nonzero(prompts < 0))
    prompts, image_bytes = prompts[unusable:], image_bytes[unusable:]
    if texts.held_out is None:
        # Whole prompts are held out: the last one comes with all of its answers.
        wanted = config.texts.held_out_texts or usual_held_out(len(prompts))
        bound = int(prompts[:wanted].max(initial=-1))
        chosen = rows.filter(expr=(col("prompt_key") >= 0) & (col("prompt_key") <= bound))
    else:
        wanted = config.texts.held_out_texts or _USUAL_HELD_OUT
        bound = -1
        chosen = _read([texts.held_out], keying).filter(expr=col("prompt_key") >= 0)
    test = _table(chosen).sort_by("key").slice(0, wanted)
    # Another distillation may have answered the same prompts, or be the same one.
    asked = np.unique(test["prompt_key"]).tolist()
    kept = (prompts > bound) & ~np.isin(prompts, asked)
    count = int(np.count_nonzero(kept))
    if not test.num_rows:
        raise InputError(
            "no text is left to measure β on: no held-out row has a prompt, all of its images, and an answer that "
            f"begins within texts.max_length, {config.texts.max_length:,} tokens"
        )
    if count < texts_per_step:
        raise InputError(
            f"input holds {count} texts to learn from ({unusable} rows have no prompt, no answer within "
            f"texts.max_length, {config.texts.max_length:,} tokens, or images that cannot be read, {test.num_rows} are "
            f"held out), and a step takes {texts_per_step}: distil more, or lower training.texts_per_step"
        )
    _write(folder, _HELD_OUT, test.select(_TEXT))
    sizes = image_bytes[kept]
    fitting = int(_PART_IMAGES // max(sizes.mean() * texts_per_step, 1.0))
    size = min(max(fitting, 1), STEPS_PER_PART) * texts_per_step
    cuts = list(range(size, count - size + 1, size))  # the last part takes the rest
    train = rows.filter(expr=(col("prompt_key") > bound) & col("prompt_key").not_in(asked)).sort("key")
    parts, tokens, counted = [], 0, np.zeros(vocab_size, np.int64)
    for number, piece in enumerate(train.split_at_indices(cuts) if cuts else [train]):
        table = _table(piece)
        part = Part(f"part-{number:06d}", table.num_rows)
        _write(folder, part.name, table.select(_TEXT))
        parts.append(part)
        tokens += pa.compute.sum(pa.compute.list_value_length(table["tokens"])).as_py()
        counted += count_answers(table, vocab_size)
    _write(folder, _COUNTS, pa.table({"count": counted}))
    with_images = int(np.count_nonzero(sizes))
    counts = TextCounts(count, tokens, int(counted.sum()), test.num_rows, unusable, with_images)
    staged = StagedTexts(folder, tuple(parts), counts)
    staged.save()
    return staged


def usual_held_out(texts: int) -> int:
    """Return the default number of held-out texts: an eighth, at least one and at most 64."""
    return min(_USUAL_HELD_OUT, max(1, texts // _LARGEST_SHARE))


def count_answers(table: pa.Table, vocab_size: int) -> NDArray[np.int64]:
    """Return the frequency of each token in the answers, `[V]`, of texts with columns `tokens` and `prompt_length`."""
    lengths = pa.compute.list_value_length(table["tokens"]).to_numpy()
    place = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    answered = place >= np.repeat(table["prompt_length"].to_numpy(), lengths)
    return np.bincount(pa.compute.list_flatten(table["tokens"]).to_numpy()[answered], minlength=vocab_size)


def _read(data: Sequence[DistilledTexts], keying: Mapping[str, Any]) -> Any:
    whole = None
    for one in data:
        paths, sees = [path for path, _ in one.files], one.images is not None
        rows = ray.data.read_parquet(paths, filesystem=one.filesystem, include_paths=sees, num_cpus=HELPER_CPUS)
        rows = rows.select_columns([*COLUMNS, *([PROMPT_IMAGES, FILE] if sees else [])]).map_batches(
            key_texts,
            batch_size=_ROWS_WITH_IMAGES if sees else None,
            batch_format="pyarrow",
            num_cpus=HELPER_CPUS,
            fn_kwargs={**keying, "images": one.images},
        )
        whole = rows if whole is None else whole.union(rows)
    assert whole is not None
    rows = whole.materialize()
    if strange := _named(rows, "problem"):
        raise InputError(f"input is not of this target model: {min(strange)}")
    if unseen := _named(rows, "unseen"):
        say(f"{len(unseen):,} rows have images that cannot be read, and are left out: {min(unseen)}")
    return rows


def _named(rows: Any, column: str) -> list[str]:
    """Return what a column says of some rows."""
    return list(_table(rows.filter(expr=col(column).is_not_null()).select_columns([column]))[column].to_pylist())


def key_texts(
    table: pa.Table,
    max_length: int,
    vocab_size: int,
    seed: int,
    model: str = "",
    trust_remote_code: bool = False,
    images: TextImages | None = None,
) -> pa.Table:
    """Return distilled rows as texts with hashes to order them by.

    `prompt_key` is −1 for a row with nothing to learn from; `problem` names a token beyond the vocabulary, if any, and
    `unseen` why a row's images cannot be read.
    """
    rows: list[dict[str, Any]] = []
    columns = [table[column].to_pylist() for column in COLUMNS]
    columns.append(table[PROMPT_IMAGES].to_pylist() if PROMPT_IMAGES in table.column_names else [None] * len(table))
    files = {} if images is None else images.files(table, model, trust_remote_code)
    for index, (name, prompt, answer, spans) in enumerate(zip(*columns, strict=True)):
        prompt, answer, seen = prompt or [], answer or [], files.get(index, [])
        tokens = [*prompt, *answer][:max_length]
        unseen = f"row {name}: {seen}" if isinstance(seen, str) else None
        key, all_seen = _hash(seed, name, tokens), unseen is None and len(seen) == len(spans or ())
        usable = all_seen and 0 < len(prompt) < len(tokens)
        # Equal words about other images are other prompts.
        digests = "".join(span["digest"] for span in spans or ())
        prompt_key = _hash(seed, digests, prompt) if usable else -1
        beyond = [token for token in tokens if not 0 <= token < vocab_size][:1]
        problem = f"row {name} has token {beyond[0]}, and the vocabulary ends at {vocab_size - 1}" if beyond else None
        kept = (seen or None) if usable else None
        size = sum(map(len, kept or ()))
        values = (tokens, len(prompt), key, prompt_key, problem, kept, size, unseen)
        rows.append(dict(zip(_SCHEMA.names, values, strict=True)))
    return pa.Table.from_pylist(rows, _SCHEMA)


def _hash(seed: int, name: str, tokens: Sequence[int]) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/".encode(), digest_size=8)
    digest.update(np.asarray(tokens, np.int64).tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def _table(rows: Any) -> pa.Table:
    tables = [table for table in ray.get(rows.to_arrow_refs()) if table.num_rows]
    return pa.concat_tables(tables) if tables else _SCHEMA.empty_table()


def _write(folder: Location, name: str, table: pa.Table) -> None:
    with (folder / f"{name}.parquet").open_whole() as stream:
        pa.parquet.write_table(table, stream, compression="zstd")
