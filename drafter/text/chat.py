"""Chat messages as the text that the base continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafter.errors import RequestError


def render_chat(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str:
    """Apply the tokeniser's chat template to messages, up to the beginning of the assistant's answer.

    The template writes the special tokens itself, so the result is to be tokenised without adding any.

    Raises:
        RequestError: The template refuses the messages.
    """
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # A template comes with the model and may raise anything.
        raise RequestError(f"the chat template does not take these messages: {' '.join(str(error).split())}") from error
