"""What the body of a chat or text completion asks of the engine.

Parameters that cannot be honoured are refused by name, and so are unknown ones: none is ignored. A parameter that is
null is not set, as with OpenAI.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypeIs

from drafter.errors import RequestError
from drafter.requests import SamplingParams
from pipeline.openai.api_error import OpenAIError

Messages = list[dict[str, Any]]
Prompt = str | list[int] | Messages
"""A text, token ids, or chat messages."""

_SEEDS = 2**63
_TOKENS = 2**31
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles that a chat template knows; `developer` is OpenAI's newer name for `system`."""
_MESSAGE_FIELDS = {"role", "content", "name"}

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's parameters that are not supported, each with the values that ask for nothing."""


@dataclass(frozen=True)
class ParsedRequest:
    """What a body asks for.

    Args:
        model: As the body names it.
        prompts: What to continue: one, or several for a text completion with a list of prompts.
        settings: The fields of `SamplingParams` that the body decides. A body that does not say the temperature asks
            for OpenAI's default of 1; without a limit of tokens or a seed, there is none here either.
        n: Choices of each prompt.
        stream: Whether tokens are to be sent as they come.
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
        """Texts to generate: `n` of the first prompt, then `n` of the next."""
        return self.n * len(self.prompts)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The settings of one text: `defaults`, changed by what the body says.

        Raises:
            OpenAIError: A value that the engine does not take.
        """
        try:
            return dataclasses.replace(defaults, **self.settings)
        except RequestError as error:
            param = str(error).split()[0]
            raise _refusal(f"Invalid value: {error}", param, "invalid_value") from error


def is_messages(prompt: Prompt) -> TypeIs[Messages]:
    """Whether a prompt is chat messages."""
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def parse_chat(body: dict[str, Any]) -> ParsedRequest:
    """What the body of a request to `/v1/chat/completions` asks for.

    Raises:
        OpenAIError: A parameter is missing, unknown, not supported or wrong.
    """
    parsed = _validated(ChatBody, body)
    if parsed.max_tokens is not None and parsed.max_completion_tokens is not None:
        raise _refusal(
            "Set 'max_tokens' or 'max_completion_tokens', not both.", "max_tokens", "invalid_parameter_combination"
        )
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise _refusal("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs", "invalid_parameter_combination")
    settings = parsed.settings()
    if parsed.max_completion_tokens is not None:
        settings["max_new_tokens"] = parsed.max_completion_tokens
    if parsed.logprobs:
        settings["logprobs"] = parsed.top_logprobs or 0
    return parsed.request((_messages(parsed.messages),), settings)


def parse_completion(body: dict[str, Any]) -> ParsedRequest:
    """What the body of a request to `/v1/completions` asks for.

    Raises:
        OpenAIError: A parameter is missing, unknown, not supported or wrong.
    """
    parsed = _validated(CompletionBody, body)
    settings = {"max_new_tokens": 16, **parsed.settings()}  # OpenAI's default for text completions
    if parsed.logprobs is not None:
        settings["logprobs"] = parsed.logprobs
    return parsed.request(_prompts(parsed.prompt), settings)


# ---- bodies


class StreamOptions(BaseModel):
    """`stream_options` of a body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Body(BaseModel):
    """What the bodies of chat and text completions share; ranges are OpenAI's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = None
    stop: Any = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # These say whose request it is, and nothing about its answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def settings(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that both kinds of body decide alike."""
        found: dict[str, Any] = {"temperature": self.temperature}
        if self.top_p == 0:  # the smallest set that reaches nothing: one token
            found["top_k"] = 1
        elif self.top_p < 1:
            found["top_p"] = self.top_p
        if self.max_tokens is not None:
            found["max_new_tokens"] = self.max_tokens
        if self.seed is not None:
            found["seed"] = self.seed % _SEEDS  # OpenAI's may be negative
        if self.stop is not None:
            found["stop"] = _stop(self.stop)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        if self.logit_bias:
            found["logit_bias"] = _logit_bias(self.logit_bias)
        return found

    def request(self, prompts: tuple[Prompt, ...], settings: dict[str, Any]) -> ParsedRequest:
        """The body with its prompts."""
        if self.stream_options is not None and not self.stream:
            raise _refusal(
                "'stream_options' needs 'stream' to be true.", "stream_options", "invalid_parameter_combination"
            )
        include_usage = self.stream_options is not None and self.stream_options.include_usage
        return ParsedRequest(self.model, prompts, settings, self.n, self.stream, include_usage)


class ChatBody(Body):
    """The body of a chat completion."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionBody(Body):
    """The body of a text completion."""

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=5)


AnyBody = TypeVar("AnyBody", bound=Body)


# ---- checks


def _validated(kind: type[AnyBody], body: dict[str, Any]) -> AnyBody:
    if not isinstance(body, dict):
        raise _refusal("The body of the request is not a JSON object.", None, "invalid_type")
    given = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in given if name in _UNSUPPORTED]:
        value = given.pop(name)
        if not any(type(value) is type(one) and value == one for one in _UNSUPPORTED[name]):
            raise _unsupported(name, value)
    options = given.get("stream_options")
    if isinstance(options, dict):
        nothing = {"include_obfuscation": False}
        given["stream_options"] = {
            name: value for name, value in options.items() if value is not None and value is not nothing.get(name)
        }
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = _path(first["loc"])
        if first["type"] == "missing":
            raise _refusal(f"Missing required parameter: '{path}'.", path, "missing_required_parameter") from error
        if first["type"] == "extra_forbidden":
            raise _refusal(f"Unknown parameter: '{path}'.", path, "unknown_parameter") from error
        code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
        raise _refusal(f"Invalid '{path}': {first['msg']}.", path, code) from error


def _refusal(message: str, param: str | None, code: str) -> OpenAIError:
    return OpenAIError(400, message, param, code)


def _unsupported(name: str, value: Any) -> OpenAIError:
    harmless = _UNSUPPORTED[name]
    if not harmless or harmless == ([],):
        return _refusal(f"Unsupported parameter: '{name}' is not supported.", name, "unsupported_parameter")
    only = " or ".join(json.dumps(one) for one in harmless)
    message = f"Unsupported value: '{name}' can only be {only}, not {_shown(value)}."
    return _refusal(message, name, "unsupported_value")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:79] + "…"


def _path(places: tuple[int | str, ...]) -> str:
    path = ""
    for place in places:
        path += f"[{place}]" if isinstance(place, int) else f".{place}" if path else place
    return path


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        message = f"Invalid 'stop': it must be a non-empty string or a list of such, not {_shown(value)}."
        raise _refusal(message, "stop", "invalid_value")
    return tuple(texts)


def _logit_bias(value: dict[str, float]) -> dict[int, float]:
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10) or not -100 <= bias <= 100:
            message = f"Invalid 'logit_bias': token ids with numbers of -100 to 100, not {_shown({token: bias})}."
            raise _refusal(message, "logit_bias", "invalid_value")
    return {int(token): bias for token, bias in value.items()}


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: known roles, contents of text."""
    plain = []
    for place, message in enumerate(messages):
        path = f"messages[{place}]"
        given = {name: value for name, value in message.items() if value is not None and value != []}
        for name in given:
            if name not in _MESSAGE_FIELDS:
                where = f"{path}.{name}"
                raise _refusal(f"Unsupported parameter: '{where}' is not supported.", where, "unsupported_parameter")
        role, name = given.get("role"), given.get("name", "")
        if not isinstance(role, str) or role not in _ROLES:
            known = ", ".join(_ROLES)
            raise _refusal(
                f"Invalid '{path}.role': it must be one of {known}, not {_shown(role)}.",
                f"{path}.role",
                "invalid_value",
            )
        if not isinstance(name, str):
            raise _refusal(f"Invalid '{path}.name': it must be text.", f"{path}.name", "invalid_type")
        content = _text(given.get("content"), f"{path}.content")
        plain.append({"role": _ROLES[role], "content": content, **({"name": name} if name else {})})
    return plain


def _text(content: Any, path: str) -> str:
    """A message's content: text, or text parts, which become lines."""
    if isinstance(content, str):
        return content
    if content is None:
        raise _refusal(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    if not isinstance(content, list):
        raise _refusal(
            f"Invalid '{path}': it must be text or a list of parts, not {_shown(content)}.", path, "invalid_type"
        )
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            message = f"Unsupported value: '{path}[{place}]' can only be a part of type \"text\", not {_shown(kind)}."
            raise _refusal(message, f"{path}[{place}]", "unsupported_value")
        if not isinstance(part.get("text"), str):
            raise _refusal(f"Invalid '{path}[{place}].text': it must be text.", f"{path}[{place}].text", "invalid_type")
        texts.append(part["text"])
    return "\n".join(texts)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, texts, the token ids of one prompt, or those of several."""
    if isinstance(value, str) or _is_tokens(value):
        return (value,)
    if (
        isinstance(value, list)
        and value
        and (all(isinstance(one, str) for one in value) or all(map(_is_tokens, value)))
    ):
        return tuple(value)
    message = f"Invalid 'prompt': it must be text, a list of texts, or (lists of) token ids, not {_shown(value)}."
    raise _refusal(message, "prompt", "invalid_type")


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < _TOKENS for token in value)
    )
