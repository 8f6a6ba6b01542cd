"""Messages come back as they went, and everything else is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter.edge.messages import (
    FROM_DEVICE,
    FROM_SERVER,
    MOST_TOKENS,
    Close,
    Draft,
    Error,
    Message,
    MessageError,
    Open,
    Opened,
    Verified,
    read,
    write,
)

SESSION = "0123456789abcdef" * 2
EVERY: list[Message] = [
    Open(SESSION, "digest", {"prompt": [1, 2], "seed": 3}),
    Open(SESSION, "digest", {"prompt": "é🙂"}, output=(4, 5), patience=2.5),
    Open(SESSION, "digest", {"messages": []}, output=(4,), prompt=(1, 2)),
    Opened(0, (7,), 16, (1, 2)),
    Opened(3, (), 16, (1, 2), finished="stop"),
    Draft(1, 0, (5, 6, 7)),
    Draft(2, 9, (5, 6, 7), (-1, -1, 0)),
    Draft(3, 9, ()),
    Verified(2, 9, 2, (5, 7, 8)),
    Verified(3, 12, 0, (1,), finished="length"),
    Close(),
    Error("gap", "there are 3 tokens", seq=4),
    Error("ended", "the session has ended"),
]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("message", EVERY, ids=str)
def test_messages_come_back(message: Message) -> None:
    assert read(write(message), FROM_DEVICE + FROM_SERVER) == message


@given(
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(-1, 40)), max_size=40),
)
def test_any_tree_comes_back(seq: int, at: int, nodes: list[tuple[int, int]]) -> None:
    tokens = tuple(token for token, _ in nodes)
    draft = Draft(seq, at, tokens, tuple(min(parent, one - 1) for one, (_, parent) in enumerate(nodes)))
    assert read(write(draft).encode(), [Draft]) == draft


@given(st.text() | st.binary())
def test_any_text_and_bytes_are_read_or_refused(text: str | bytes) -> None:
    with pytest.raises(MessageError):
        read(text, FROM_DEVICE)


@given(st.sampled_from(EVERY), st.data())
def test_messages_with_something_else_in_them_are_read_or_refused(message: Message, data: st.DataObject) -> None:
    given_ = json.loads(write(message))
    name = data.draw(st.sampled_from([*given_, "type", "seq", "parents", "unknown"]))
    if data.draw(st.booleans()):
        given_[name] = data.draw(JSON)
    else:
        given_.pop(name, None)
    with suppress(MessageError):
        found = read(json.dumps(given_), FROM_DEVICE + FROM_SERVER)
        assert read(write(found), FROM_DEVICE + FROM_SERVER) == found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"type": "sing"}, 'there is no message of type "sing": there are open, draft, close'),
        ({"type": "verified"}, 'there is no message of type "verified"'),
        ({"seq": -1}, "draft.seq must be an integer from 0, not -1"),
        ({"seq": True}, "draft.seq must be an integer from 0, not true"),
        ({"seq": None}, "draft.seq must be an integer from 0, not null"),
        ({"at": 1.0}, "draft.at must be an integer from 0, not 1.0"),
        ({"tokens": [1, 2**31]}, "draft.tokens must be a list of token ids"),
        ({"tokens": list(range(MOST_TOKENS + 1))}, "draft.tokens has 257 tokens: at most 256 may come"),
        ({"parents": [-1]}, "draft.parents must have an index for each token"),
        ({"parents": [0, 0, 1]}, "draft.parents must have an index for each token"),
        ({"parents": [-2, 0, 1]}, "draft.parents must be a list of integers from -1"),
        ({"more": 1}, 'draft has no field "more"'),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], says: str) -> None:
    good = json.loads(write(Draft(1, 0, (5, 6, 7), (-1, 0, 1))))
    with pytest.raises(MessageError) as error:
        read(json.dumps(good | change), FROM_DEVICE)
    assert says in str(error.value)


def test_what_is_missing_and_another_version_are_named() -> None:
    with pytest.raises(MessageError, match="draft needs the field tokens"):
        read('{"type":"draft","seq":1,"at":0}', FROM_DEVICE)
    opening = json.loads(write(EVERY[0]))
    with pytest.raises(MessageError, match="version 2 is not spoken here: use 1") as error:
        read(json.dumps(opening | {"version": 2}), FROM_DEVICE)
    assert error.value.code == "version"
    for no_message in ("[1]", "NaN", '{"type":"close","x":"\\ud800"}', "[" * 100_000):
        with pytest.raises(MessageError, match="the message is not"):
            read(no_message, FROM_DEVICE)


def test_a_text_is_followed_through_a_tree() -> None:
    draft = Draft(0, 0, (5, 6, 7, 6), (-1, -1, 0, 0))  # 5 → 7, 5 → 6, and 6
    assert draft.follow([5, 6, 7]) == [0, 3]
    assert draft.follow([6, 5]) == [1]
    assert draft.follow([9]) == draft.follow([]) == []
    assert Draft(0, 0, (5, 6)).follow([5, 6, 7]) == [0, 1]
