"""A prompt of messages and images, as the target model's own processor of transformers writes it.

The processor says what stands for an image, and makes the arrays that the model takes. The text around it is encoded as
that of any chat, so that nothing that is said becomes an image's placeholder.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL.Image import Image, fromarray
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from drafter.errors import LoadError, RequestError, first_line, one_line
from drafter.hub import local_only
from drafter.prompt import Prompt, Span
from drafter.text.chat import encode_chat, encode_chats, render_chat
from drafter.text.conversation import Conversation, Messages
from drafter.text.tokenizers import load_tokenizer, longest_token, refuse_endless, tokenise

_OF_TEXT = frozenset({"input_ids", "attention_mask", "labels", "text_replacement_offsets"})
_VIDEOS = "video_processor"
_KINDS = ("mm_token_type_ids", "token_type_ids")
"""Names by which models take the kind of each token, an image's or not."""


class ImageProcessor:
    """Makes prompts of messages and images, by a processor of transformers. It needs no weights."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        if template := getattr(processor, "chat_template", None):
            self.tokenizer.chat_template = template

    def encode(
        self,
        asked: Conversation | Messages | str,
        images: Sequence[Image] = (),
        *,
        special_tokens: bool = False,
        max_length: float = math.inf,
        now: datetime | None = None,
        salt: str = "",
    ) -> Prompt:
        """Return the prompt of a chat whose parts `{"type": "image"}` are the `images` (RGB), in order.

        Of a text, it is the prompt that the model's processor makes of it, where the text has a placeholder for each.

        Args:
            special_tokens: Parse special tokens in the text of messages; by default they are plain text there.
            max_length: Tokens that the prompt may have; much longer ones are refused before they are tokenised.
            now: Time for chat templates that read the clock; by default the present.
            salt: As in `render_chat`.

        Raises:
            RequestError: The template takes no such messages, there are more or fewer images than parts, or the
                processor cannot take one.
        """
        if isinstance(asked, str):
            refuse_endless(asked, max_length, longest_token(self.tokenizer))
            made = self._process(asked, images)
            return self._prompt(made, made["input_ids"][0].tolist(), images)
        asked = asked if isinstance(asked, Conversation) else Conversation(asked)
        if asked.image_parts != len(images):
            raise RequestError(f"the messages have {asked.image_parts} parts of images, and {len(images)} are given")
        if self.tokenizer.chat_template is None:
            raise RequestError("the processor has no chat template, which says where images go")
        if not images:
            settings: dict[str, Any] = {"special_tokens": special_tokens, "max_length": max_length, "now": now}
            settings["salt"] = salt
            return Prompt(encode_chat(self.tokenizer, asked, **settings))
        chat = render_chat(self.tokenizer, asked, now, salt)
        refuse_endless(chat.text, max_length, longest_token(self.tokenizer))
        (found,) = encode_chats(self.tokenizer, [chat], special_tokens=special_tokens)
        if isinstance(found, RequestError):
            raise found
        return self._with_images(chat.text, found, images)

    def again(self, ids: Sequence[int], images: Sequence[Image]) -> Prompt:
        """Return the prompt that `encode` has made of these images, by its token ids.

        Raises:
            RequestError: The ids have other placeholders than these images take, or the processor cannot take one.
        """
        made = self._process(self.processor.image_token * len(images), images)
        return self._prompt(made, list(ids), images)

    def _with_images(self, text: str, written: list[int], images: Sequence[Image]) -> Prompt:
        """Return the prompt of a text, whose tokens are `written`, with what stands for the images in their places."""
        mark: str = self.processor.image_token
        place = self.tokenizer.convert_tokens_to_ids(mark)
        if written.count(place) != len(images):
            raise RequestError(
                f"the chat template writes {mark!r}, which stands for an image, {written.count(place)} times for "
                f"{len(images)} images: it puts them elsewhere, or a message has this text"
            )
        made = self._process(mark * len(images), images)
        pieces = _pieces(made)
        if self._ids(text) == written:  # nothing that is said looks like a token, and words may go on beside an image
            parts = text.split(mark)
            ids = self._ids("".join(one for pair in zip(parts, [*pieces, ""], strict=True) for one in pair))
        else:
            ids, left = [], iter(pieces)
            for token in written:
                ids += self._ids(next(left)) if token == place else [token]
        return self._prompt(made, ids, images)

    def _prompt(self, made: Mapping[str, Any], ids: list[int], images: Sequence[Image]) -> Prompt:
        """Return the prompt of these ids, of which some stand for what was `made` of the images."""
        stand = set(self.processor.image_token_ids)
        counts = [sum(token in stand for token in self._ids(piece)) for piece in _pieces(made)]
        spans = _spans(np.flatnonzero(np.isin(ids, list(stand))), counts, [digest(image) for image in images])
        return Prompt.of_images(ids, spans, self._inputs(made, ids))

    def _process(self, text: str, images: Sequence[Image]) -> Mapping[str, Any]:
        try:
            return self.processor(  # type: ignore[no-any-return]
                text=[text],
                images=[list(images)],
                return_text_replacement_offsets=True,
                return_tensors="np",
            )
        except Exception as error:  # a processor raises anything for sizes that it was not made for
            raise RequestError(f"the model's processor cannot take these images: {one_line(error, 200)}") from error

    def _inputs(self, made: Mapping[str, Any], ids: list[int]) -> dict[str, npt.NDArray[np.generic]]:
        inputs = {name: np.asarray(made[name]) for name in made if name not in {*_OF_TEXT, *_KINDS}}
        for name in set(_KINDS) & set(made):
            kinds = [[0] * len(ids)]
            if self.processor.return_mm_token_type_ids:
                kinds = self.processor.create_mm_token_type_ids([ids])
            inputs[name] = np.asarray(kinds)
        return inputs

    def _ids(self, text: str) -> list[int]:
        return list(tokenise(self.tokenizer, [text], add_special_tokens=False)["input_ids"][0])


def example_of(processor: ImageProcessor) -> Prompt:
    """Return a prompt with an image, for the proof that a model reads it."""
    pixels = (np.indices((48, 64)).sum(0) * 37 % 256).astype(np.uint8)
    asked: Messages | str = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    ]
    if processor.tokenizer.chat_template is None:
        asked = f"{processor.processor.image_token}What is this?"
    return processor.encode(asked, [fromarray(pixels).convert("RGB")])


def digest(image: Image) -> bytes:
    """Return what images of equal pixels have in common, whatever file they come from."""
    # A processor may lay what is transparent over white, also where the pixels are RGB and a colour counts as such.
    pixels = image.convert("RGBA")
    return hashlib.sha256(b"%dx%d:" % pixels.size + pixels.tobytes()).digest()


def _pieces(made: Mapping[str, Any]) -> list[str]:
    """Return the text that stands for each image."""
    return [one["replacement"] for one in made["text_replacement_offsets"][0]]


def _spans(places: npt.NDArray[np.int64], counts: Sequence[int], digests: Sequence[bytes]) -> tuple[Span, ...]:
    """Return a span for each image, of `counts` of the `places` of placeholders."""
    if len(places) != sum(counts) or not all(counts):
        raise RequestError("a message has the text of a placeholder for images: leave it out")
    ends = np.cumsum(counts)
    found = zip(ends, counts, digests, strict=True)
    return tuple(Span(int(places[end - count]), int(places[end - 1]) + 1, one) for end, count, one in found)


def load_processor(
    name_or_path: str | Path, *, trust_remote_code: bool = False, local_files_only: bool = False
) -> ImageProcessor | None:
    """Load the processor of a target model that sees, given by hub id or folder; None for one of text alone.

    Raises:
        LoadError: The model sees, and its processor cannot be loaded.
    """
    name = os.path.expanduser(name_or_path)
    where = {"local_files_only": local_files_only or local_only(name), "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(name, **where)
        if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            return None
        processor = _load(config, name, where)
    except Exception as error:  # transformers, the hub's client and remote code have errors of their own
        raise LoadError(f"the processor of {name!r} cannot be loaded: {first_line(error)}") from error
    if getattr(processor, "image_token", None) is None:
        raise LoadError(f"the processor of {name!r} has no token that stands for an image")
    return ImageProcessor(processor)


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
