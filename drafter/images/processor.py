"""A prompt of messages and images, as the target model's own processor of transformers writes it.

The processor says what stands for an image, and makes the arrays that the model takes. The text around it is encoded as
that of any chat, so that nothing that is said becomes an image's placeholder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL.Image import new
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from drafter.confined import BoundError, Bounds, Confined
from drafter.errors import LoadError, RequestError, first_line, one_line
from drafter.gguf_files import gguf_file
from drafter.hub import local_only
from drafter.images.opening import Fetch, GivenImage, ImageLimits, given_images, open_images, pixel_digest
from drafter.prompt import Prompt, Span
from drafter.text.chat import render_chat, tokens_of
from drafter.text.conversation import Conversation, Messages
from drafter.text.tokenizers import load_tokenizer, longest_token, refuse_endless, tokenise

_OF_TEXT = frozenset({"input_ids", "attention_mask", "labels"})
_VIDEOS = "video_processor"
_KINDS = ("mm_token_type_ids", "token_type_ids")  # names by which models take the kind of each token, an image's or not
_USUAL = ImageLimits()
_MEMORY, _PIXEL_MEMORY = 128 << 20, 14
"""Bytes in which a prompt is made of images, and those for each pixel that they may have: four copies of an image, of
3 or 4 bytes a pixel, are there at the same time, or what the processor makes of many small ones."""
_SECONDS, _PIXELS_PER_SECOND = 10.0, 4e6
"""Likewise of processor time."""


@dataclass(frozen=True)
class Processed:
    """What a processor of transformers makes of images and of a text with a placeholder for each.

    Args:
        arrays: By the processor's own names.
        pieces: The text that stands for each image.
        digests: Of each image.
    """

    arrays: dict[str, npt.NDArray[Any]]
    pieces: list[str]
    digests: list[bytes]


class ImageProcessor:
    """Makes prompts of messages and images, by a processor of transformers. It needs no weights.

    Args:
        confined: Does `processed` in a process of its own, as images may come from anybody; None does it here, for
            images that nobody else has made.
    """

    def __init__(self, processor: Any, confined: Confined | None = None) -> None:
        self.processor, self.tokenizer, self.confined = processor, processor.tokenizer, confined
        if template := getattr(processor, "chat_template", None):
            self.tokenizer.chat_template = template

    def encode(
        self,
        asked: Conversation | Messages | str,
        images: Sequence[Any] = (),
        *,
        limits: ImageLimits = _USUAL,
        fetch: Fetch | None = None,
        special_tokens: bool = False,
        max_length: float = math.inf,
        now: datetime | None = None,
    ) -> Prompt:
        """Return the prompt of a chat whose parts `{"type": "image"}` are the `images`, in order.

        Of a text, it is the prompt that the model's processor makes of it, where the text has a placeholder for each.

        Args:
            images: Sources as in `open_image`, and so is `fetch`.
            special_tokens: Parse special tokens in the text of messages; by default they are plain text there.
            max_length: Tokens that the prompt may have; much longer ones are refused before they are tokenised.
            now: Time for chat templates that read the clock; by default the present.

        Raises:
            RequestError: The template takes no such messages, there are more or fewer images than parts, or an image
                cannot be opened, exceeds a limit, or is one that the processor cannot take.
        """
        process = partial(self._process, images=images, limits=limits, fetch=fetch)
        if isinstance(asked, str):
            refuse_endless(asked, max_length, longest_token(self.tokenizer))
            made = process(asked)
            return self._prompt(made, made.arrays["input_ids"][0].tolist())
        asked = asked if isinstance(asked, Conversation) else Conversation(asked)
        if asked.image_parts != len(images):
            raise RequestError(f"the messages have {asked.image_parts} parts of images, and {len(images)} are given")
        if self.tokenizer.chat_template is None:
            raise RequestError("the processor has no chat template, which says where images go")
        chat = render_chat(self.tokenizer, asked, now)
        found = tokens_of(self.tokenizer, chat, special_tokens=special_tokens, max_length=max_length)
        return self._with_images(chat.text, found, len(images), process) if images else Prompt(found)

    def again(self, ids: Sequence[int], images: Sequence[Any], limits: ImageLimits = _USUAL) -> Prompt:
        """Return the prompt that `encode` has made of these images, by its token ids.

        Raises:
            RequestError: The ids have other placeholders than these images take, or as in `encode`.
        """
        made = self._process(self.processor.image_token * len(images), images, limits)
        return self._prompt(made, list(ids))

    def _with_images(self, text: str, written: list[int], images: int, process: Callable[[str], Processed]) -> Prompt:
        """Return the prompt of a text, whose tokens are `written`, with what stands for the images in their places."""
        mark: str = self.processor.image_token
        place = self.tokenizer.convert_tokens_to_ids(mark)
        if written.count(place) != images:
            raise RequestError(
                f"the chat template writes {mark!r}, which stands for an image, {written.count(place)} times for "
                f"{images} images: it puts them elsewhere, or a message has this text"
            )
        made = process(mark * images)
        pieces = made.pieces
        if self._ids(text) == written:  # nothing that is said looks like a token, and words may go on beside an image
            parts = text.split(mark)
            ids = self._ids("".join(one for pair in zip(parts, [*pieces, ""], strict=True) for one in pair))
        else:
            ids, left = [], iter(pieces)
            for token in written:
                ids += self._ids(next(left)) if token == place else [token]
        return self._prompt(made, ids)

    def _prompt(self, made: Processed, ids: list[int]) -> Prompt:
        """Return the prompt of these ids, of which some stand for what was `made` of the images."""
        stand = set(self.processor.image_token_ids)
        counts = [sum(token in stand for token in self._ids(piece)) for piece in made.pieces]
        spans = _spans(np.flatnonzero(np.isin(ids, list(stand))), counts, made.digests)
        return Prompt.of_images(ids, spans, self._inputs(made.arrays, ids))

    def _process(self, text: str, images: Sequence[Any], limits: ImageLimits, fetch: Fetch | None = None) -> Processed:
        given = given_images(images, limits, fetch=fetch)
        if self.confined is None:
            return processed(self.processor, text, given, limits)
        bounds = Bounds(_MEMORY + _PIXEL_MEMORY * limits.pixels, _SECONDS + limits.pixels / _PIXELS_PER_SECOND)
        try:
            return self.confined.run(text, given, limits, bounds=bounds)  # type: ignore[no-any-return]
        except BoundError as error:
            raise RequestError(
                f"no prompt is made of these images: {error}. Give fewer or smaller ones, or allow more pixels"
            ) from error

    def _inputs(self, made: Mapping[str, npt.NDArray[Any]], ids: list[int]) -> dict[str, npt.NDArray[np.generic]]:
        inputs = {name: array for name, array in made.items() if name not in {*_OF_TEXT, *_KINDS}}
        for name in set(_KINDS) & set(made):
            kinds = [[0] * len(ids)]
            if self.processor.return_mm_token_type_ids:
                kinds = self.processor.create_mm_token_type_ids([ids])
            inputs[name] = np.asarray(kinds)
        return inputs

    def _ids(self, text: str) -> list[int]:
        return list(tokenise(self.tokenizer, [text], add_special_tokens=False)["input_ids"][0])


def processed(processor: Any, text: str, given: Sequence[GivenImage], limits: ImageLimits) -> Processed:
    """Return what a processor of transformers makes of images, and of a text with a placeholder for each.

    Raises `RequestError` if an image cannot be opened, exceeds a limit, or is one that the processor cannot take.
    """
    images = open_images(given, limits)
    digests = [pixel_digest(image) for image in images]
    try:
        made = processor(text=[text], images=[images], return_text_replacement_offsets=True, return_tensors="np")
    except MemoryError:
        raise
    except Exception as error:  # a processor raises anything for sizes that it was not made for
        raise RequestError(f"the model's processor cannot take these images: {one_line(error, 200)}") from error
    pieces = [one["replacement"] for one in made.pop("text_replacement_offsets")[0]]
    return Processed({name: np.asarray(made[name]) for name in made}, pieces, digests)


def example_of(processor: ImageProcessor) -> Prompt:
    """Return a prompt with an image, for the proof that a model reads it."""
    here = ImageProcessor(processor.processor)
    pixels = (np.indices((48, 64)).sum(0) * 37 % 256).astype(np.uint8)
    asked: Messages | str = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    ]
    if processor.tokenizer.chat_template is None:
        asked = f"{processor.processor.image_token}What is this?"
    return here.encode(asked, [pixels])


def _spans(places: npt.NDArray[np.int64], counts: Sequence[int], digests: Sequence[bytes]) -> tuple[Span, ...]:
    """Return a span for each image, of `counts` of the `places` of placeholders."""
    if len(places) != sum(counts) or not all(counts):
        raise RequestError("a message has the text of a placeholder for images: leave it out")
    ends = np.cumsum(counts)
    found = zip(ends, counts, digests, strict=True)
    return tuple(Span(int(places[end - count]), int(places[end - 1]) + 1, one) for end, count, one in found)


def load_processor(name_or_path: str | Path, *, trust_remote_code: bool = False) -> ImageProcessor | None:
    """Load the processor of a target model that sees, given by hub id or folder; None for one of text alone.

    GGUF files have the part of a model that reads text.

    Raises `LoadError` if the model sees, and its processor cannot be loaded.
    """
    name = os.path.expanduser(name_or_path)
    if gguf_file(name) is not None:
        return None
    where = {"local_files_only": local_only(name), "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(name, **where)
        if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            return None
        processor = _load(config, name, where)
    except Exception as error:  # transformers, the hub's client and remote code have errors of their own
        raise LoadError(f"the processor of {name!r} cannot be loaded: {first_line(error)}") from error
    if getattr(processor, "image_token", None) is None:
        raise LoadError(f"the processor of {name!r} has no token that stands for an image")
    # All of it is on this machine by now.
    return ImageProcessor(processor, Confined(_prepare, name, where | {"local_files_only": True}))


def _prepare(name: str, where: Mapping[str, Any]) -> Callable[..., Processed]:
    """Return `processed` by the processor of a model that sees, with all that it imports as it is first used."""
    processor = _load(AutoConfig.from_pretrained(name, **where), name, where)
    work = partial(processed, processor)
    tiny = GivenImage(new("RGB", (32, 32)), "image")
    with suppress(RequestError):  # said of the first image that is not ours
        work(processor.image_token, [tiny], _USUAL)
    return work


def without_videos(kind: Any) -> Any:
    """Return a class of processors that is like `kind`, but takes None for its part for videos."""
    from transformers import ProcessorMixin  # with the code of processors, which takes seconds

    class WithoutVideos(ProcessorMixin):
        """Comes behind `kind` in the order of classes, and so gets the parts that this hands on by name."""

        def __init__(self, *args: Any, **others: Any) -> None:
            others.pop(_VIDEOS, None)
            super().__init__(*args, **others)

    parts = [part for part in kind.get_attributes() if part != _VIDEOS]
    return type(kind.__name__, (kind, WithoutVideos), {"get_attributes": classmethod(lambda _: parts)})


def _load(config: Any, name: str, where: Mapping[str, Any]) -> Any:
    """Load a processor; without its part for videos, where this lacks what it needs, such as torchvision."""
    # With the code of models, which takes seconds.
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        return AutoProcessor.from_pretrained(name, **where)
    except Exception:
        kind = PROCESSOR_MAPPING.get(type(config), None)
        if kind is None or _VIDEOS not in kind.get_attributes():
            raise
    loaders: dict[str, Callable[[], Any]] = {
        "image_processor": lambda: AutoImageProcessor.from_pretrained(name, **where),
        "tokenizer": lambda: load_tokenizer(name, **where),
        "feature_extractor": lambda: AutoFeatureExtractor.from_pretrained(name, **where),  # of sounds
        _VIDEOS: lambda: None,
    }
    settings, _ = kind.get_processor_dict(name, **where)
    return without_videos(kind).from_args_and_dict([loaders[part]() for part in kind.get_attributes()], settings)
