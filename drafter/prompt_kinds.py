"""Kinds of prompts: a text, token ids, messages, a `Conversation`, or a `Prompt`; and how each becomes tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeGuard

from drafter.errors import RequestError, shown
from drafter.half_characters import refuse_half_characters
from drafter.images.messages import images_apart
from drafter.images.opening import ImageLimits
from drafter.prompt import Prompt
from drafter.text.chat import encode_chat
from drafter.text.conversation import Conversation
from drafter.text.tokenizers import longest_token, refuse_endless, tokenise

if TYPE_CHECKING:  # it imports transformers' models
    from drafter.images.processor import ImageProcessor


def each_prompt(prompts: object) -> Iterator[object]:
    """Yield prompts one by one, as Python objects. A text, a list of token ids or a list of messages is one prompt."""
    if any(hasattr(prompts, name) for name in ("columns", "column_names")):  # of pandas and Polars; Arrow and datasets
        raise RequestError(f"prompts must be one column of the {type(prompts).__name__}, such as table['prompt']")
    found = plain(prompts)
    if isinstance(found, str | Conversation | Prompt) or is_tokens(found) or is_chat(found):
        yield found
    elif isinstance(found, Mapping | bytes) or not isinstance(found, Iterable):
        raise RequestError(
            f"prompts must be a text, a list of token ids, messages, or many of these, not {shown(prompts)}"
        )
    else:
        yield from map(plain, found)


def plain(value: object) -> object:
    """Convert an array, a column, or an entry of one, to Python objects."""
    # Of Arrow; Polars and pandas; NumPy and PyTorch; a scalar of Arrow
    for name in ("to_pylist", "to_list", "tolist", "as_py"):
        if callable(convert := getattr(value, name, None)):
            return convert()
    return value


def is_tokens(prompt: object) -> TypeGuard[Sequence[int]]:
    return _is_list_of(Integral, prompt) and not _is_list_of(bool, prompt)


def is_chat(prompt: object) -> TypeGuard[list[Mapping[str, Any]]]:
    return _is_list_of(Mapping, prompt)


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list | tuple | range) and bool(value) and all(isinstance(one, kind) for one in value)


def as_chat(prompt: object, *settings: Any) -> Conversation:
    """Return messages, or a text as a message of the user, with other fields of a `Conversation`."""
    if isinstance(prompt, Conversation):
        return prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not is_chat(prompt):
        raise RequestError(f"a conversation must be a text or a list of messages, not {shown(prompt)}")
    return Conversation(prompt, *settings)


def encode_prompt(
    prompt: Any,
    tokenizer: Any,
    processor: ImageProcessor | str,
    images: Sequence[Any] = (),
    limits: ImageLimits | None = None,
    *,
    special_tokens: bool,
    max_length: int,
    now: datetime | None,
) -> list[int] | Prompt:
    """Return the tokens of a prompt, or a prompt with its images; see `SpeculativeLM.encode`.

    `processor` is what makes prompts with images, or why there is none.
    """
    if isinstance(prompt, Prompt):
        if images:
            raise RequestError("a Prompt of tokens has its own images: give others with messages or a text")
        return prompt
    prompt = plain(prompt)
    if is_tokens(prompt) and not images:
        return [int(token) for token in prompt]
    prompt, sources = images_apart(prompt, images)
    refuse_half_characters(vars(prompt) if isinstance(prompt, Conversation) else prompt)
    settings: dict[str, Any] = {"special_tokens": special_tokens, "max_length": max_length, "now": now}
    if sources:
        if isinstance(processor, str):
            raise RequestError(f"the prompt has images, and {processor}: leave them out")
        return processor.encode(prompt, sources, limits=limits or ImageLimits(), **settings)
    if isinstance(prompt, str):
        refuse_endless(prompt, max_length, longest_token(tokenizer))
        return list(tokenise(tokenizer, [prompt])["input_ids"][0])
    if not (isinstance(prompt, Conversation) or is_chat(prompt)):
        raise RequestError(f"a prompt must be a text, a list of token ids or messages, not {shown(prompt)}")
    if tokenizer.chat_template is None:
        raise RequestError("the tokenizer has no chat template: give the prompt as text")
    return encode_chat(tokenizer, prompt, **settings)
