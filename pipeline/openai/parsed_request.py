"""What a body asks for, checked and in the engine's terms."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypeIs

from drafter.errors import RequestError
from drafter.requests import SamplingParams
from pipeline.openai.api_error import bad_request

Messages = list[dict[str, Any]]
Prompt = str | list[int] | Messages
"""A text, token ids, or chat messages."""


@dataclass(frozen=True)
class ParsedRequest:
    """What a body asks for.

    Args:
        model: The model's name in the body.
        prompts: What to continue: one prompt, or several for a text completion with a list of prompts.
        settings: The fields of `SamplingParams` that the body decides; what it leaves out is not here.
        n: Choices of each prompt.
        stream: Whether tokens are sent as they come.
        include_usage: Whether a stream ends with the usage.
    """

    model: str
    prompts: tuple[Prompt, ...]
    settings: dict[str, Any]
    n: int = 1
    stream: bool = False
    include_usage: bool = False

    @property
    def choices(self) -> int:
        """Number of texts to generate: `n` of the first prompt, then `n` of the next."""
        return self.n * len(self.prompts)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self.settings.get("logprobs") is not None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Return the settings of one text: `defaults`, which draw, changed by what the body decides.

        Raises:
            OpenAIError: A value that the engine does not take.
        """
        try:
            return dataclasses.replace(defaults, **self.settings)
        except RequestError as error:
            param = str(error).split()[0]
            raise bad_request(f"Invalid value: {error}", param, "invalid_value") from error


def is_messages(prompt: Prompt) -> TypeIs[Messages]:
    """Return whether a prompt is chat messages."""
    return isinstance(prompt, list) and isinstance(prompt[0], dict)
