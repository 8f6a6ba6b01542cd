"""Input and output of the engine, and the sampling defaults that come with a model."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from drafter.errors import LoadError, RequestError, first_line, shown, unknown_setting
from drafter.half_characters import refuse_half_characters
from drafter.prompt import Prompt, TextKey
from drafter.statistics import DecodeCounts, mean_acceptance_length
from drafter.structured_outputs import StructuredOutputs

FinishReason = Literal["stop", "length", "cancelled", "error"]
GenerationRule = Literal["auto", "ignore"]  # `auto` uses sampling settings that come with a model, `ignore` does not
GENERATION_FILE = "generation_config.json"

MOST_STOPS = 16  # stop strings per request; bounded, like their length, because every new token is searched for them
LONGEST_STOP = 1000  # characters of a stop string, and of a bad word
_MOST_STOP_TOKENS = 256
_MOST_BAD_WORDS = 1024
_MOST_LOGPROBS = 20
_NUMBERS = (
    ("temperature", 0.0, math.inf, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, math.inf, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)
"""Float settings: name, lowest and highest value, and whether the lowest is excluded."""
_UNSET = ("seed", "stop", "stop_token_ids", "logit_bias", "min_tokens", "allowed_token_ids", "bad_words")
"""Settings for which None stands for their default."""
_INTEGERS = (("max_new_tokens", 1, math.inf), ("top_k", 0, math.inf), ("logprobs", 0, _MOST_LOGPROBS))
"""Integer settings that may be None: name, lowest and highest value."""
DRAW = "gumbel"
"""Name of the sampling scheme that maps seeds to tokens: another name stands for other tokens from the same seed."""
SEEDS = 2**63  # upper bound of seeds, so that they fit an int64 column

_MODEL_SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings of a model's `generation_config.json` that are defaults of requests."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dola_layers", "exponential_decay_length_penalty", "forced_bos_token_id"), ()),
    **dict.fromkeys(("forced_eos_token_id", "max_time", "top_h", "watermarking_config"), ()),
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "constraints", "force_words_ids"), ([],)),
    **dict.fromkeys(("stop_strings", "suppress_tokens"), ([],)),
    **dict.fromkeys(("diversity_penalty", "min_length", "min_new_tokens", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("guidance_scale", "num_beams", "num_return_sequences", "typical_p"), (1,)),
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "token_healing": (False,),
}
"""Unsupported settings that change the tokens of a decoder-only model, with the values that have no effect; null has
none either. Other values are errors: to ignore them would silently give other tokens."""


def hashed_seed(seed: int, name: str) -> int:
    """Derive a seed below `SEEDS` from another one and a name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEEDS


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of a sample of a prompt with a seed of its own, which is the first sample's."""
    return hashed_seed(seed, f"#{sample}") if sample else seed


Settings = TypeVar("Settings")


def naming_mistakes(error: type[ValueError]) -> Callable[[type[Settings]], type[Settings]]:
    """Make the `__init__` of a dataclass of settings name the right one in its `error` for an unknown one."""

    def decorate(kind: type[Settings]) -> type[Settings]:
        made = kind.__init__

        @wraps(made)
        def init(self: Settings, *values: Any, **settings: Any) -> None:
            if problem := unknown_setting(settings, kind):
                raise error(problem)
            made(self, *values, **settings)

        kind.__init__ = init  # type: ignore[method-assign, assignment]
        return kind

    return decorate


@naming_mistakes(RequestError)
@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings and stop conditions of a request.

    Names and meanings follow transformers' `generate`; `presence_penalty`, `frequency_penalty` and `logit_bias` are
    OpenAI's. `drafter.acceptance.choices` says in which order they apply. None stands for the value in the model's
    `generation_config.json`, or else that of `ResolvedSampling`.

    Args:
        max_new_tokens: Most tokens to generate; the end-of-sequence token counts. By default 256.
        temperature: 0, the default, takes the most probable token; above 0, tokens are sampled at this temperature.
        top_k: Keep the k most probable tokens; 0, the default, keeps all.
        top_p: Keep the smallest set of most probable tokens whose probability reaches this; 1, the default, keeps all.
        min_p: Keep tokens at least this fraction as probable as the most probable one; 0, the default, keeps all.
        repetition_penalty: Divide positive (multiply negative) logits of tokens already seen; 1, the default, leaves
            them.
        presence_penalty: Subtracted from the logit of every token that has been generated, -2 to 2.
        frequency_penalty: Subtracted from the logit of a token as often as it has been generated, -2 to 2.
        logit_bias: Added to the logits of these tokens, -100 to 100: a mapping from token ids, or (token, bias) pairs,
            as which it is kept.
        logprobs: Return the target model's log-probability of each token, and of so many most probable alternatives: 0
            to 20, or None for neither. They are taken from its logits before all of the above.
        seed: Below 2**63. Tokens are a function of (model, prompt, seed) alone: see `docs/research/method.md`.
        stop: Strings (or one) that end the text, which is cut before the first one. Up to 16, of up to 1000 characters
            each.
        stop_token_ids: Tokens that end the text as the end-of-sequence token does, also with `ignore_eos`. Up to 256.
        ignore_eos: Generate on past the end-of-sequence token.
        min_tokens: Nothing ends the text before so many tokens: until then the end-of-sequence token and
            `stop_token_ids` are not chosen, and stop strings not looked for.
        allowed_token_ids: Choose from these tokens alone; empty, the default, is all.
        bad_words: Words that the output does not contain: after all tokens of one but the last, that is not chosen.
            They are tokenised as they are and after a space. Up to 1024, of up to 32 tokens each.
        structured_outputs: What the output must be, by one of `json` (a JSON schema), `json_object`, `regex`, `choice`
            and `grammar`: `StructuredOutputs`, or a mapping.

    Raises:
        RequestError: A value is of the wrong type, not finite or out of range.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name in _UNSET:  # None leaves them unset, as in other libraries
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(SamplingParams, name))
        for name, least, most in _INTEGERS:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _integer(name, value, least, most))
        for name in ("seed", "min_tokens"):
            object.__setattr__(self, name, _integer(name, getattr(self, name), 0))
        if self.seed >= SEEDS:  # the endpoint, whose seeds may be negative, takes another one for it
            raise RequestError(f"seed must be less than 2**63, not {shown(self.seed)}")
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is more than max_new_tokens {self.max_new_tokens}")
        for name, low, high, low_open in _NUMBERS:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _number(name, value, low, high, low_open=low_open))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        self._keep_texts("stop", MOST_STOPS)
        self._keep_texts("bad_words", _MOST_BAD_WORDS)
        for name, most in (("stop_token_ids", _MOST_STOP_TOKENS), ("allowed_token_ids", math.inf)):
            tokens = _checked_list(name, getattr(self, name), "token ids", _is_token)
            if len(tokens) > most:
                raise RequestError(f"{name} may have up to {most} tokens, not {len(tokens)}")
            object.__setattr__(self, name, tokens)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, not {shown(self.ignore_eos)}")
        object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.ignore_eos and self.structured_outputs is not None:
            raise RequestError(
                "ignore_eos does not go with structured_outputs, which say where the output ends: leave it out"
            )

    def _keep_texts(self, name: str, most: int) -> None:
        """Check a setting that is one string or several, and keep it as a tuple."""
        given = (given,) if isinstance(given := getattr(self, name), str) else given
        texts = _checked_list(name, given, "non-empty strings", lambda one: isinstance(one, str) and one != "")
        if len(texts) > most:
            raise RequestError(f"{name} may have up to {most} strings, not {len(texts)}")
        if (longest := max(map(len, texts), default=0)) > LONGEST_STOP:
            raise RequestError(f"{name} may have strings of up to {LONGEST_STOP} characters, not {longest}")
        refuse_half_characters(texts, name)
        object.__setattr__(self, name, texts)

    @property
    def limited(self) -> bool:
        """True if some tokens may not be chosen."""
        return bool(self.min_tokens or self.allowed_token_ids or self.bad_words)

    def over(self, defaults: ResolvedSampling | None = None) -> ResolvedSampling:
        """Fill in the settings that are None from `defaults`."""
        if isinstance(self, ResolvedSampling):
            return self
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(defaults or ResolvedSampling(), **{"logprobs": None, **given})


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    """Convert `value` to a float in `[low, high]`, or `(low, high]` if `low_open`."""
    if isinstance(value, Real) and not isinstance(value, int | float):  # such as a number of NumPy
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise RequestError(f"{name} must be a finite number, not {shown(value)}")
    if value < low or value > high or (low_open and value == low):
        span = f"{'more than' if low_open else 'at least'} {low:g}{f' and at most {high:g}' if high < math.inf else ''}"
        raise RequestError(f"{name} must be {span}, not {shown(value)}")
    return float(value)


def _integer(name: str, value: object, low: int, high: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        span = f"of at least {low}{f' and at most {high}' if high < math.inf else ''}"
        raise RequestError(f"{name} must be an integer {span}, not {shown(value)}")
    return int(value)


def _checked_list(name: str, value: object, kind: str, fits: Callable[[Any], bool]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not all(map(fits, value)):
        raise RequestError(f"{name} must be a list of {kind}, not {shown(value)}")
    return tuple(value)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    refusal = RequestError(f"logit_bias must map token ids to numbers, not be {shown(value)}")
    try:
        pairs = [(token, bias) for token, bias in (value.items() if isinstance(value, Mapping) else value)]
    except (TypeError, ValueError) as error:
        raise refusal from error
    found: dict[int, float] = {}
    for given, bias in pairs:
        # Keys of a JSON object are text.
        token = int(given) if isinstance(given, str) and given.isascii() and given.isdigit() else given
        if not _is_token(token):
            raise refusal
        found[token] = bias
    return tuple((token, _number(f"logit_bias of token {token}", found[token], -100, 100)) for token in sorted(found))


@dataclass(frozen=True)
class ResolvedSampling(SamplingParams):
    """`SamplingParams` with no setting left to the model."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Raises:
        RequestError: `timeout` is not a finite number above 0, or `prompt_logprobs` is not a number of alternatives.
    """

    prompt: Prompt | Sequence[int]  # token ids become a `Prompt`
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""  # the caller's name for it; comes back in `Generation`
    timeout: float | None = None  # seconds from submission until it ends with `RequestTimeoutError`
    prompt_logprobs: int | None = None  # as `SamplingParams.logprobs`, of each token of the prompt
    drawn_logprobs: bool = False  # `logprobs` are of what tokens are drawn from: after temperature and all else
    may_teach: bool = True  # allow online learning; otherwise its text never leaves the engine for a learner
    salt: str = ""  # whose it is: prefixes are shared with requests of the same one only, and slots fairly between them
    background: bool = False  # it enters last and is parked first: no other request waits for it

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, Prompt):
            object.__setattr__(self, "prompt", Prompt(self.prompt))
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(f"the sampling of a Request must be SamplingParams, not {shown(self.sampling)}")
        if self.timeout is not None:
            _number("timeout", self.timeout, 0.0, math.inf, low_open=True)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, _MOST_LOGPROBS)

    @property
    def prompt_ids(self) -> Sequence[int]:
        assert isinstance(self.prompt, Prompt)
        return self.prompt.ids

    def key(self, text: npt.NDArray[np.int64]) -> TextKey:
        """Return the key of a text `[L]` that begins with the prompt."""
        assert isinstance(self.prompt, Prompt)
        return self.prompt.key(self.salt, text)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token under the target model, before penalties, bias and temperature.

    With `Request.drawn_logprobs`, after these and all filters.

    `top` are (token, log-probability) of the most probable tokens at its position, in falling order.
    """

    token_id: int
    logprob: float | None  # None for the first token of a prompt, which follows nothing
    top: tuple[tuple[int, float], ...]
    rank: int | None = field(default=None, compare=False)  # among all tokens, from 1; files have none


@dataclass(frozen=True)
class Timing:
    """Seconds from a request's submission until it entered a slot, its first token, and its end."""

    queued: float | None = None
    first_token: float | None = None
    total: float = 0.0


@dataclass(frozen=True)
class Generation:
    """Result of a `Request`.

    The finish reason is `stop` (end of sequence or stop string), `length` (limit reached), `cancelled`, or `error`,
    which only `SpeculativeLM` gives, for a prompt that could not be generated.
    """

    request_id: str
    token_ids: list[int]  # new tokens, the end-of-sequence token included where it was chosen
    text: str  # the answer: `token_ids` decoded without special tokens and reasoning, cut before the stop string
    finish_reason: FinishReason
    num_prompt_tokens: int
    counts: DecodeCounts
    logprobs: list[TokenLogprob] | None = None  # of each of `token_ids`, if requested
    timing: Timing = Timing()
    verifier: str = "exact"  # name of the verifier that accepted draft tokens
    lossless: bool = True  # that verifier guarantees the tokens of plain decoding
    lenient: list[int] = field(default_factory=list)  # indices of tokens that the target model would not have chosen
    forced: list[int] = field(default_factory=list)  # indices of tokens that `structured_outputs` left no choice about
    valid: bool | None = None  # the output is whole, as `structured_outputs` ask for it; None without these
    drafter_versions: list[int] = field(default_factory=list)  # of a learning head: those that drafted, in order
    weights_version: int = 0  # how often the target model's weights had been updated when it was decoded
    error: str | None = None  # reason for a missing text
    prompt_logprobs: list[TokenLogprob] | None = None  # of each token of the prompt, if requested
    reasoning_content: str | None = None  # what comes before the answer; None for a model that does not reason
    marked: str | None = field(default=None, repr=False)  # `text` with the marks of calls: see `CallMarks`
    num_cached_tokens: int = 0  # tokens of the prompt whose state was there already, from other requests
    asked: StructuredOutputs | None = field(default=None, repr=False, compare=False)

    @cached_property
    def parsed(self) -> Any:
        """The output as what `structured_outputs` ask for: an instance of the type that was given, or the JSON value.

        The text where these ask for no JSON, and None where the output is not valid.
        """
        return self.asked.read(self.text) if self.valid and self.asked is not None else None

    @property
    def mean_acceptance_length(self) -> float:
        return mean_acceptance_length(self.counts)


@dataclass(frozen=True)
class TokenDelta:
    """Tokens that one decode step added to a request, for streaming."""

    token_ids: list[int]  # the accepted draft tokens and the bonus token
    text: str  # without characters with missing bytes, and possible beginnings of a stop string: they are held back
    accepted: int  # number of draft tokens among `token_ids`
    logprobs: list[TokenLogprob] | None = None
    forced: list[tuple[int, int]] = field(default_factory=list)  # (start, end) in `text`, as `Generation.forced`
    reasoning_content: str = ""  # more of it, before all text
    marked: str | None = field(default=None, repr=False)  # as `Generation.marked`


def read_generation_file(folder: Path, name: str) -> dict[str, Any]:
    """Return the settings in the `generation_config.json` of a model's folder; empty without such a file."""
    file = folder / GENERATION_FILE
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"model {name}: its {GENERATION_FILE} cannot be read: {first_line(error)}") from error
    if not isinstance(settings, dict):
        raise LoadError(f"model {name}: its {GENERATION_FILE} is not a JSON object")
    return settings


def sampling_defaults(settings: Mapping[str, Any], name: str, *, drawn: bool = False) -> ResolvedSampling:
    """Return the sampling defaults of requests, by the settings of the model, as in transformers and vLLM.

    Args:
        drawn: Sample by default, as OpenAI does, at a temperature of 1 or the model's. Otherwise decoding is greedy,
            unless the settings have `do_sample`, as in transformers' `generate`.

    Raises:
        LoadError: A setting is not supported, or has a value that the engine does not take.
    """
    override = f"set generation_config to ignore to decode without the model's {GENERATION_FILE}"
    for setting, neutral in _NEUTRAL.items():
        value = settings.get(setting)
        if value is not None and value not in neutral:
            raise LoadError(
                f"model {name}: its {GENERATION_FILE} asks for {setting} {shown(value)}, which this engine cannot do: "
                f"remove it there, or {override}"
            )
    given = _model_settings(settings)
    if not (drawn or settings.get("do_sample") is True):
        given["temperature"] = 0.0
    elif given.get("temperature") is None:
        given["temperature"] = 1.0
    try:
        return ResolvedSampling(**given)
    except RequestError as error:
        raise LoadError(f"model {name}: its {GENERATION_FILE}: {error}: correct it, or {override}") from error


def described(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a line about a model's sampling defaults; None where it has none."""
    given = _model_settings(settings)
    if settings.get("do_sample") is True:
        given = {"do_sample": True, **given}
    if not given:
        return None
    listed = ", ".join(f"{setting} {value}" for setting, value in given.items())
    return (
        f"model {name}: defaults of its {GENERATION_FILE}: {listed} (what a request sets itself goes before; "
        "generation_config ignore leaves them out)"
    )


def _model_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {setting: settings[setting] for setting in _MODEL_SETTINGS if settings.get(setting) is not None}
