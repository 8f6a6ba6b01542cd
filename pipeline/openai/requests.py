"""Parses and validates request bodies of the endpoint and of batch files."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drafter.errors import PromptTooLongError, RequestError
from drafter.images.messages import take_images
from drafter.other_names import NOT_SUPPORTED, OURS
from drafter.requests import LONGEST_STOP, SEEDS, SamplingParams, sample_seed
from drafter.structured_outputs import CallOutputs
from drafter.text.conversation import Conversation
from pipeline.openai.errors import (
    OpenAIError,
    bad_request,
    can_only_be,
    clipped,
    contradiction,
    invalid,
    missing,
    not_supported,
    shown,
)
from pipeline.openai.messages import chat_messages
from pipeline.openai.output import wanted_output
from pipeline.openai.told_tools import FORM, is_told, told
from pipeline.openai.tools import Tools, call_form, chat_tools, reads_tools

if TYPE_CHECKING:
    from drafter.text.call_marks import CallMarks

SEES_NOTHING = "the messages have images, and the model takes text alone"
"""What is wrong with a request to such a model."""
MOST_STOPS = 4
"""OpenAI's limit; rows of other formats may have more."""
MOST_BIASES = 1024
"""Tokens of `logit_bias`; each is checked for each choice."""
_LIMITS = ("min_tokens", "allowed_token_ids", "bad_words")
_OUTPUT = re.compile(r"structured_outputs\b(?P<calls>\.calls)?(\.\w+)?:? *")
"""What an error about structured outputs begins with."""
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's parameters that are not supported, with their harmless values."""


logger = logging.getLogger(__name__)
AnyBody = TypeVar("AnyBody", bound="Body")
Prompt = str | list[int] | Conversation
"""A text, token ids, or a chat."""


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request body; `settings` are the fields of `SamplingParams` that it sets.

    `output_field` is the field of the body that says what the output must be.
    """

    model: str
    prompts: tuple[Prompt, ...]
    settings: dict[str, Any]
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    tools: Tools | None = None  # the functions that may be called
    output_field: str = "structured_outputs"
    marks: CallMarks | None = None  # of calls in an output, once they are known; see `for_model`
    images: tuple[str, ...] = ()  # addresses of a chat's images, in the order of their places in its messages
    token_ids: bool = False  # the answer has those of prompt and output
    prompt_logprobs: int | None = None  # log-probabilities of the prompt, with so many of the most probable tokens

    @property
    def choices(self) -> int:
        """Number of texts to generate: `n` of the first prompt, then `n` of the next."""
        return self.n * len(self.prompts)

    def seed_of(self, choice: int, seed: int) -> int:
        """Return the seed of one of the `choices`, given the request's: the choices of each prompt have the same."""
        return sample_seed(seed, choice % self.n)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompts[0], Conversation)

    @property
    def wants_logprobs(self) -> bool:
        return self.settings.get("logprobs") is not None or self.prompt_logprobs is not None

    @property
    def scored(self) -> int | None:
        """So many of the most probable tokens at each place of a prompt that is scored; None if it need not be."""
        echoed = self.settings.get("logprobs") if self.echo else None
        return max((one for one in (echoed, self.prompt_logprobs) if one is not None), default=None)

    def for_model(self, tokenizer: Any) -> ParsedRequest:
        """Return the request with its tools and their calls in the form of the model's chat template.

        Raises `OpenAIError` if there must be a call, and the form is not one that output can be held to.
        """
        chat = self.prompts[0]
        if not isinstance(chat, Conversation) or not is_told(chat):
            return self
        # Late: what only parses bodies does without torch.
        from drafter.text.call_marks import CallMarks

        form, needed = call_form(tokenizer, chat.tools or ()), self.tools is not None and self.tools.needed
        if not reads_tools(tokenizer, chat.tools or ()):
            chat, form = told(chat, needed=needed, system=_takes_system(tokenizer)), FORM
        request = replace(self, prompts=(chat,))
        if self.tools is None:
            return request
        if form is None and needed:
            message = "Unsupported value: 'tool_choice' can only be none or auto with this model's form of calls."
            raise bad_request(message, "tool_choice", "unsupported_value")
        if form is None:  # calls stay text
            return replace(request, tools=None)
        try:
            wanted = CallOutputs(calls=self.tools.calls(form, self.settings.get("structured_outputs")))
        except RequestError as error:
            refusal = self.unusable_output(str(error))
            raise refusal or bad_request(f"Invalid 'tools': {error}.", "tools", "invalid_value") from error
        settings = self.settings | {"structured_outputs": wanted}
        return replace(request, marks=CallMarks.of(tokenizer, form), settings=settings)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Return `defaults` overridden by the body; raises an `OpenAIError` for a value that the engine refuses."""
        try:
            return replace(defaults, **self.settings)
        except RequestError as error:
            message = str(error)
            refusal = self.unusable_output(message)
            raise refusal or bad_request(f"Invalid value: {message}", message.split()[0], "invalid_value") from error

    def unusable_output(self, message: str) -> OpenAIError | None:
        """Return the error for structured outputs that the engine refuses with a message; None for another message."""
        found = _OUTPUT.match(message)
        if found is None:
            return None
        param = "tools" if found["calls"] else self.output_field
        return bad_request(f"Invalid '{param}': {message[found.end() :]}", param, "invalid_value")


def refuse_images(count: int, most: int | None) -> None:
    """Raise an `OpenAIError` for more images than a request may have; `most` is None for a model that sees none."""
    if count and most is None:
        raise bad_request(f"Invalid 'messages': {SEES_NOTHING}.", "messages", "invalid_value")
    if most is not None and count > most:
        message = f"Invalid 'messages': up to {most} images are allowed, not {count}."
        raise bad_request(message, "messages", "array_above_max_length")


def refused(error: RequestError, request: ParsedRequest | None) -> OpenAIError:
    """Return the error for a request, if it is known, that cannot be generated."""
    if isinstance(error, PromptTooLongError):
        return OpenAIError(400, f"Invalid request: {error}.", code="context_length_exceeded")
    unusable = None if request is None else request.unusable_output(str(error))
    return unusable or OpenAIError(400, f"Invalid request: {error}.", code="invalid_value")


@lru_cache(maxsize=4)
def _takes_system(tokenizer: Any) -> bool:
    """Return whether the chat template takes a message of the system; say that it reads no tools, once."""
    from drafter.text.chat import takes_system

    logger.warning("the chat template reads no tools: a message tells the model of them, and how calls are written")
    return takes_system(tokenizer)


def _conversation(parsed: ChatBody, *, with_tools: bool) -> tuple[Conversation, list[str]]:
    """Return a chat, and the addresses of its images."""
    said, tools = chat_messages(parsed.messages), parsed.tools
    asked = (parsed.documents, parsed.chat_template_kwargs, parsed.add_generation_prompt, parsed.continue_final_message)
    try:
        said, images = take_images(said)
        return Conversation(said, tools if tools and with_tools else None, *asked), images
    except RequestError as error:
        raise bad_request(f"Invalid value: {error}.", str(error).split()[0], "invalid_value") from error


def _completion_prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts of a text, of texts, of the token ids of one prompt, or of those of several."""
    if isinstance(value, str) or _is_tokens(value):
        return (value,)
    several = value if isinstance(value, list) else []
    if several and (all(isinstance(one, str) for one in several) or all(map(_is_tokens, several))):
        return tuple(several)
    raise invalid("prompt", "be text, a list of texts, or (lists of) token ids", value)


def _is_tokens(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int and 0 <= token < 2**31 for token in value)


def parse_chat(body: dict[str, Any]) -> ParsedRequest:
    """Parse the body of a request to `/v1/chat/completions`.

    Raises `OpenAIError` if a parameter is missing, unknown, not supported or wrong.
    """
    parsed = _validated(ChatBody, body)
    if parsed.max_tokens is not None and parsed.max_completion_tokens is not None:
        raise contradiction("Set 'max_tokens' or 'max_completion_tokens', not both.", "max_tokens")
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise contradiction("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    settings = parsed.settings()
    if parsed.max_completion_tokens is not None:
        settings["max_new_tokens"] = parsed.max_completion_tokens
    if parsed.logprobs:
        settings["logprobs"] = parsed.top_logprobs or 0
    tools = chat_tools(parsed.tools, parsed.tool_choice, parsed.parallel_tool_calls)
    wanted = settings.get("structured_outputs")
    if tools is not None and wanted is not None and wanted.kind not in ("json", "json_object"):
        message = f"'structured_outputs.{wanted.kind}' does not go with 'tools': set 'tool_choice' to none."
        raise contradiction(message, "structured_outputs")
    if tools is not None and parsed.ignore_eos:
        raise contradiction("'ignore_eos' does not go with 'tools': a call ends the output.", "ignore_eos")
    chat, images = _conversation(parsed, with_tools=tools is not None)
    return replace(parsed.request((chat,), settings, tools=tools), images=tuple(images))


def parse_completion(body: dict[str, Any]) -> ParsedRequest:
    """Parse the body of a request to `/v1/completions`; raises as `parse_chat` does."""
    parsed = _validated(CompletionBody, body)
    settings = {"max_new_tokens": 16, **parsed.settings()}  # OpenAI's default
    if parsed.logprobs is not None:
        settings["logprobs"] = parsed.logprobs
    if parsed.echo and parsed.stream:
        raise contradiction("'echo' needs 'stream' to be false.", "echo")
    return parsed.request(_completion_prompts(parsed.prompt), settings, echo=parsed.echo)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Body(BaseModel):
    """Fields shared by the bodies of chat and text completions; ranges are OpenAI's.

    Pydantic checks single values only. For a list or an object it would make an error of each wrong value, which takes
    seconds and hundreds of megabytes for a megabyte.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = None
    stop: Any = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Any = None
    response_format: Any = None
    # vLLM's parameters, which its clients send in `extra_body`.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    ignore_eos: bool | None = None
    stop_token_ids: Any = None
    min_tokens: int | None = Field(None, ge=0)
    allowed_token_ids: Any = None
    bad_words: Any = None
    structured_outputs: Any = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool = False
    stream_options: StreamOptions | None = None
    # These identify the client and do not affect the answer.
    user: str | None = None
    metadata: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that both kinds of body set in the same way."""
        same = ("temperature", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", *_LIMITS)
        found = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        penalties = ("presence_penalty", "frequency_penalty")
        found |= {name: getattr(self, name) for name in penalties if getattr(self, name)}
        if self.top_k is not None:
            found["top_k"] = max(self.top_k, 0)  # vLLM's -1 keeps all
        if self.top_p == 0:  # the smallest set that reaches nothing: one token
            found["top_k"] = 1
        elif self.top_p is not None:
            found["top_p"] = self.top_p
        if self.max_tokens is not None:
            found["max_new_tokens"] = self.max_tokens
        if self.seed is not None:
            found["seed"] = self.seed % SEEDS  # OpenAI's may be negative
        if self.stop is not None:
            found["stop"] = _stop(self.stop)
        if self.logit_bias is not None:
            found["logit_bias"] = _logit_bias(self.logit_bias)
        if (wanted := wanted_output(self.response_format, self.structured_outputs)) is not None:
            found["structured_outputs"] = wanted
        return found

    def request(
        self, prompts: tuple[Prompt, ...], settings: dict[str, Any], *, echo: bool = False, tools: Tools | None = None
    ) -> ParsedRequest:
        if self.stream_options is not None and not self.stream:
            raise contradiction("'stream_options' needs 'stream' to be true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise contradiction("'prompt_logprobs' needs 'stream' to be false.", "prompt_logprobs")
        include_usage = self.stream_options is not None and self.stream_options.include_usage
        output_field = "response_format" if self.response_format is not None else "structured_outputs"
        told = self.n, self.stream, include_usage, echo, tools, output_field
        made = ParsedRequest(self.model, prompts, settings, *told)
        return replace(made, token_ids=bool(self.return_token_ids), prompt_logprobs=self.prompt_logprobs)


class ChatBody(Body):
    messages: Any
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # vLLM's parameters for the chat template.
    documents: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class CompletionBody(Body):
    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False


def _validated(kind: type[AnyBody], body: dict[str, Any]) -> AnyBody:
    if not isinstance(body, dict):
        raise bad_request("The body of the request is not a JSON object.", None, "invalid_type")
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in kind.model_fields and name not in _UNSUPPORTED:
            raise not_supported(name) if name in NOT_SUPPORTED else _unknown(name, kind)
    for name in [name for name in given if name in _UNSUPPORTED]:
        value, harmless = given.pop(name), _UNSUPPORTED[name]
        if any(type(value) is type(one) and value == one for one in harmless):
            continue
        if not harmless or harmless == ([],):
            raise not_supported(name)
        raise can_only_be(name, " or ".join(json.dumps(one) for one in harmless), value)
    options = given.get("stream_options")
    if isinstance(options, dict):
        given["stream_options"] = options = {
            name: value
            for name, value in options.items()
            if value is not None and not (name == "include_obfuscation" and value is False)  # these have no effect
        }
        for name in options:
            if name not in StreamOptions.model_fields:
                raise _unknown(f"stream_options.{name}", kind)
    metadata = given.get("metadata")
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise bad_request("Invalid 'metadata': it must be an object with texts.", "metadata", "invalid_type")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> OpenAIError:
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return missing(path)
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    found = "" if ", not " in first["msg"] else f", not {shown(first['input'])}"
    return bad_request(f"Invalid '{path}': {first['msg']}{found}.", path, code)


def _unknown(name: str, kind: type[Body]) -> OpenAIError:
    ours = OURS.get(name, name)
    theirs = "max_tokens" if ours == "max_new_tokens" else ours
    name = clipped(name)
    use = f": use '{theirs}'" if theirs != name and theirs in kind.model_fields else ""
    return bad_request(f"Unknown parameter: '{name}'{use}.", name, "unknown_parameter")


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise invalid("stop", "be a non-empty string or a list of such", value, "invalid_value")
    if len(texts) > MOST_STOPS:
        message = f"Invalid 'stop': up to {MOST_STOPS} strings are allowed, not {len(texts)}."
        raise bad_request(message, "stop", "array_above_max_length")
    if (longest := max(map(len, texts), default=0)) > LONGEST_STOP:
        message = f"Invalid 'stop': a string may have up to {LONGEST_STOP} characters, not {longest}."
        raise bad_request(message, "stop", "string_above_max_length")
    return tuple(texts)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise invalid("logit_bias", "be an object", value)
    if len(value) > MOST_BIASES:
        message = f"Invalid 'logit_bias': up to {MOST_BIASES} tokens are allowed, not {len(value)}."
        raise bad_request(message, "logit_bias", "object_above_max_properties")
    for token, bias in value.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not number or not (token.isascii() and token.isdigit() and len(token) < 10):
            message = f"Invalid 'logit_bias': token ids with numbers of -100 to 100, not {shown({token: bias})}."
            raise bad_request(message, "logit_bias", "invalid_value")
    return {int(token): float(bias) for token, bias in value.items()}
