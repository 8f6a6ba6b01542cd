"""Images of distilled rows: found and checked where texts are staged, which keeps their files, and read by workers."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from drafter.errors import LoadError, RequestError
from drafter.images.opening import ImageLimits, image_content, named
from drafter.prompt import Prompt
from pipeline.generate.output_images import OutputImages, images_of_output, reading_of_output
from pipeline.generate.row_images import ImageReading
from pipeline.io.files import in_parallel
from pipeline.output.columns import PROMPT_IMAGES
from pipeline.output.folder import OutputFolder

if TYPE_CHECKING:
    from drafter.images.processor import ImageProcessor

FILE = "path"
"""Column in which Ray Data names the file of a row."""
_CHECKED = ImageLimits(sys.maxsize, sys.maxsize, sys.maxsize)
"""Files in a staged text have passed their distillation's limits."""
ImageFiles = list[bytes] | str
"""The files of a text's images, or why they cannot be had."""


@dataclass(frozen=True)
class TextImages:
    """How the images of a distillation's rows are read."""

    images: OutputImages
    reading: ImageReading

    def files(self, rows: pa.Table, model: str, trust_remote_code: bool) -> dict[int, ImageFiles]:
        """Return the files of the images of rows that have any, by a row's index.

        They are read as training will read them, by the processor of the target model `model`, and must be those that
        it has seen. `rows` are distilled ones, with the column `FILE`.
        """
        spans = rows[PROMPT_IMAGES].to_pylist()
        seeing = [index for index, one in enumerate(spans) if one]
        if not seeing:
            return {}
        try:
            processor = processor_of(model, trust_remote_code)
        except LoadError as error:
            return dict.fromkeys(seeing, str(error))
        some = rows.take(pa.array(seeing))
        sources = self._sources(some)

        def content(name: str) -> ImageFiles:
            try:
                return [image_content(one, self.reading.limits, fetch=self.reading.fetch) for one in sources[name]]
            except KeyError:
                return "the staged input of its distillation is gone"
            except RequestError as error:
                return str(error)

        names, prompts = some["request_id"].to_pylist(), some["prompt_token_ids"].to_pylist()
        found = dict(zip(seeing, in_parallel(content, names), strict=True))
        for index, name, ids in zip(seeing, names, prompts, strict=True):
            files = found[index]
            if isinstance(files, list):
                try:
                    self._check(spans[index], ids, sources[name], files, processor)
                except RequestError as error:
                    found[index] = str(error)
        return found

    def _sources(self, rows: pa.Table) -> dict[str, list[Any]]:
        names: dict[str, list[str]] = defaultdict(list)
        for name, file in zip(rows["request_id"].to_pylist(), rows[FILE].to_pylist(), strict=True):
            names[file.rpartition("/")[2].removesuffix(".parquet")].append(name)
        found: dict[str, list[Any]] = {}
        for file, some in names.items():
            found |= self.images.sources(some, [file])
        return found

    def _check(
        self,
        spans: Sequence[Mapping[str, Any]],
        ids: Sequence[int],
        sources: Sequence[Any],
        files: Sequence[bytes],
        processor: ImageProcessor,
    ) -> None:
        """Raise `RequestError` unless the files are the images that the prompt `ids` had in these spans."""
        if len(files) != len(spans):
            raise RequestError(f"its prompt had {len(spans)} images, and its staged input has {len(files)}")
        addresses = [source if isinstance(source, str) else None for source in sources]
        images = [{"path": address, "bytes": file} for address, file in zip(addresses, files, strict=True)]
        found = processor.again(ids, images, self.reading.limits).spans
        for source, one, span in zip(sources, found, spans, strict=True):
            if one.digest.hex() != span["digest"]:
                raise RequestError(f"{named(source)}: it has changed since the target model has seen it")
        if [(one.start, one.stop) for one in found] != [(span["start"], span["stop"]) for span in spans]:
            raise RequestError("the target model's processor has other places for its images now: distil again")


def text_images(output: OutputFolder, run: Mapping[str, Any]) -> TextImages:
    """Return how the images of a distillation's rows are read; `run` is its `run.json`."""
    return TextImages(images_of_output(output, run), reading_of_output(run))


@lru_cache(maxsize=1)
def processor_of(model: str, trust_remote_code: bool) -> ImageProcessor:
    """Return the processor of a target model that sees, loaded once in a process; raise `LoadError` for another."""
    from drafter.images.processor import load_processor  # late, as it imports transformers' models

    processor = load_processor(model, trust_remote_code=trust_remote_code)
    if processor is None:
        raise LoadError(f"the model {model} reads text alone")
    return processor


def prompt_of(processor: ImageProcessor, ids: Sequence[int], files: Sequence[bytes]) -> Prompt:
    """Return the prompt of a staged text of these ids and images; raise `RequestError` if it cannot be made."""
    return processor.again(ids, files, _CHECKED)
