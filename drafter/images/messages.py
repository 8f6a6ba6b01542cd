"""Takes images out of chat messages, in OpenAI's and in Hugging Face's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from drafter.errors import RequestError, shown
from drafter.text.conversation import Conversation, are_objects

IMAGE = "image"
PLACE: dict[str, str] = {"type": IMAGE}
"""The part of a message that stands for the next image, in the form that chat templates read."""
_SOURCES = ("image", "url", "path", "base64")


def take_images(messages: Any, images: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
    """Return messages with `{"type": "image"}` for each image, and the sources of these, in order.

    Images are parts such as `{"type": "image_url", "image_url": {"url": …}}` and `{"type": "image", "path": …}` (or
    `image`, `url`, `base64`). Parts without a source stand for `images`, one after the other. If there are no such
    parts, these come first in the first message of the user. What is no list of messages stays as it is.

    Raises:
        RequestError: A part is of another form, or there are more or fewer parts without a source than `images`.
    """
    found: list[Any] = []
    left = list(images)
    open_parts = 0

    def taken(part: Any, place: str) -> Any:
        nonlocal open_parts
        if not isinstance(part, Mapping):
            return part
        # Parts of a table have all names, most with nulls, and templates ask whether a part has an `image`.
        part = {name: value for name, value in part.items() if value is not None}
        if part.get("type") not in ("image_url", IMAGE):
            return part
        source = _source(part, place)
        if source is None:
            open_parts += 1
            if not left:
                many = f"only {len(images)} are given" if images else "none is given"
                raise RequestError(f"{place} stands for image {open_parts} beside the messages, and {many}")
            source = left.pop(0)
        found.append(source)
        return PLACE

    if not are_objects(messages):
        if images:
            raise RequestError(f"messages must be a list of messages with role and content, not {shown(messages)}")
        return messages, []
    if images and not any(_is_open(part) for message in messages for part in _parts(message)):
        messages, left = _with_places(messages, len(images)), list(images)
    made = []
    for number, message in enumerate(messages, start=1):
        parts = _parts(message)
        if parts:
            place = f"message {number}, part"
            message = {**message, "content": [taken(part, f"{place} {n}") for n, part in enumerate(parts, start=1)]}
        made.append(message)
    if left:
        raise RequestError(f"there are {len(images)} images, and the messages have places for {open_parts} of them")
    return made, found


def has_images(messages: Any) -> bool:
    if not are_objects(messages):
        return False
    parts = (part for message in messages for part in _parts(message))
    return any(isinstance(part, Mapping) and part.get("type") in ("image_url", IMAGE) for part in parts)


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_open(part: Any) -> bool:
    given = isinstance(part, Mapping) and part.get("type") == IMAGE
    return given and all(part.get(name) is None for name in _SOURCES)


def _source(part: Mapping[str, Any], place: str) -> Any:
    """Return where an image is; None for a part without a source."""
    kind = part["type"]
    given = {name: value for name, value in part.items() if name != "type"}
    if kind == "image_url":
        url = given.pop(kind, None)
        url = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(url, str) or given:
            raise RequestError(f"{place} must be {{type: image_url, image_url: {{url: …}}}}, not {shown(part)}")
        return url
    if len(given) > 1 or not given.keys() <= set(_SOURCES):
        raise RequestError(f"{place} is an image, and so has one of {', '.join(_SOURCES)}, not {', '.join(given)}")
    for name, value in given.items():
        if name != IMAGE and not isinstance(value, str):
            raise RequestError(f"{place} has no text as its {name}, but {shown(value)}")
        return f"data:;base64,{value}" if name == "base64" else value
    return None


def _with_places(messages: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return messages whose first one of the user begins with so many images."""
    made = list(messages)
    for number, message in enumerate(made):
        if message.get("role") == "user":
            content = message.get("content")
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(_parts(message))
            made[number] = {**message, "content": [PLACE] * count + parts}
            return made
    raise RequestError("there are images, and the messages have no place for them, and none is a user's")


def images_apart(prompt: Any, images: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return a prompt without the images in it, and all of them in order; see `take_images`."""
    if isinstance(prompt, str):
        return prompt, list(images)
    if isinstance(prompt, Conversation):
        messages, sources = take_images(prompt.messages, images)
        return replace(prompt, messages=messages), sources
    return take_images(prompt, images)
