"""Chat messages → the text that the base continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafter.errors import RequestError


def render_chat(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str:
    """Messages put through the chat template, up to where the assistant begins.

    The template writes the special tokens itself: tokenise the result without adding any.

    Raises:
        RequestError: The template does not take the messages.
    """
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise errors of many kinds, and are not ours
        raise RequestError(f"the chat template does not take these messages: {' '.join(str(error).split())}") from error
