from __future__ import annotations

from typing import Any

import pytest

from drafter.errors import RequestError
from drafter.images.messages import PLACE, has_images, take_images


def says(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def test_both_forms_of_images_are_taken_in_order() -> None:
    system = {"role": "system", "content": "Look."}
    messages = [
        system,
        says(
            {"type": "image_url", "image_url": {"url": "a", "detail": "low"}},
            text("and"),
            {"type": "image", "url": "b"},
        ),
        {"role": "assistant", "content": None},
        says({"type": "image", "path": "c", "url": None}, {"type": "image_url", "image_url": "d"}),
        says({"type": "image", "base64": "QQ=="}, {"type": "image", "image": 7}),
    ]
    left, sources = take_images(messages)
    assert sources == ["a", "b", "c", "d", "data:;base64,QQ==", 7]
    assert left[:2] == [system, says(PLACE, text("and"), PLACE)]
    assert left[2:] == [messages[2], says(PLACE, PLACE), says(PLACE, PLACE)]
    assert messages[1]["content"][0]["type"] == "image_url"  # what was given is as before
    assert has_images(messages)
    assert not has_images([system])


def test_parts_have_no_nulls() -> None:
    parts = {"type": "image", "image": "a", "text": None}, {"type": "text", "text": "b", "image": None}
    assert take_images([says(*parts)]) == ([says(PLACE, text("b"))], ["a"])


def test_messages_without_images_stay() -> None:
    for messages in ([{"role": "user", "content": "a"}], "a", None, [1]):
        assert take_images(messages) == (messages, [])


def test_images_beside_the_messages_take_their_places() -> None:
    placed = [says({"type": "image"}, text("or"), {"type": "image", "path": "b"}, {"type": "image"})]
    assert take_images(placed, ["a", "c"])[1] == ["a", "b", "c"]
    bare = [{"role": "system", "content": "s"}, {"role": "user", "content": "What?"}, {"role": "user", "content": "x"}]
    left, sources = take_images(bare, ["a", "b"])
    assert left == [bare[0], says(PLACE, PLACE, text("What?")), bare[2]]
    assert sources == ["a", "b"]


@pytest.mark.parametrize(
    ("messages", "images", "why"),
    [
        ([says({"type": "image"})], [], "message 1, part 1 stands for image 1 beside the messages, and none is given"),
        ([says({"type": "image"}, {"type": "image"})], ["a"], "stands for image 2 beside the messages, and only 1"),
        ([says({"type": "image"})], ["a", "b"], "2 images, and the messages have places for 1"),
        ([{"role": "system", "content": "s"}], ["a"], "none is a user's"),
        ([says({"type": "image_url", "image_url": {}})], [], "must be {type: image_url"),
        ([says({"type": "image_url"})], [], "must be {type: image_url"),
        ([says({"type": "image", "path": "a", "url": "b"})], [], "one of image, url, path, base64, not path, url"),
        ([says({"type": "image", "min_pixels": 3})], ["a"], "not min_pixels"),
        ([says({"type": "image", "path": 3})], [], "no text as its path"),
        ("What?", ["a"], "must be a list of messages"),
    ],
)
def test_mistakes_are_named(messages: Any, images: list[Any], why: str) -> None:
    with pytest.raises(RequestError) as refused:
        take_images(messages, images)
    assert why in str(refused.value)
