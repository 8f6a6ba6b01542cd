"""Input and output of the engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from drafter.errors import RequestError, shown
from drafter.statistics import DecodeCounts, mean_acceptance_length

FinishReason = Literal["stop", "length", "cancelled", "error"]

MOST_LOGPROBS = 20
"""Largest number of alternatives per token whose log-probabilities a request may ask for."""
MOST_STOPS = 16
"""Stop strings per request."""
LONGEST_STOP = 1000
"""Characters of a stop string."""
MOST_STOP_TOKENS = 256
"""Stop tokens per request."""
_NUMBERS = (
    ("temperature", 0.0, math.inf, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, math.inf, True),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)
"""Float settings: name, lowest and highest value, and whether the lowest is excluded."""

DRAW = "gumbel"
"""Name of the sampling scheme that maps seeds to tokens: another name stands for other tokens from the same seed."""


SEEDS = 2**63
"""Upper bound of derived seeds, so that they fit an int64 column."""


def hashed_seed(seed: int, name: str) -> int:
    """Derive a seed below `SEEDS` from another one and a name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEEDS


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    """Convert `value` to a float: an integer may be too large for a tensor.

    Raises:
        RequestError: It is no finite number in `[low, high]` (`(low, high]` if `low_open`).
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise RequestError(f"{name} must be a finite number, not {shown(value)}")
    if value < low or value > high or (low_open and value == low):
        span = f"{'more than' if low_open else 'at least'} {low:g}{f' and at most {high:g}' if high < math.inf else ''}"
        raise RequestError(f"{name} must be {span}, not {shown(value)}")
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _integer(name: str, value: object, low: int, high: float = math.inf) -> None:
    """Raise `RequestError` unless `value` is an integer in `[low, high]`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        span = f"of at least {low}{f' and at most {high}' if high < math.inf else ''}"
        raise RequestError(f"{name} must be an integer {span}, not {shown(value)}")


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        found = {_token(token): bias for token, bias in pairs}  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise RequestError(f"logit_bias must map token ids to numbers, not be {shown(value)}") from error
    checked = {token: _number(f"logit_bias of token {token}", bias, -100.0, 100.0) for token, bias in found.items()}
    return tuple(sorted(checked.items()))


def _token(value: object) -> int:
    # Keys of a JSON object are text.
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a token id")
    return value


def _stops(value: object) -> tuple[str, ...]:
    # Bounded, because every new token is searched for them.
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise RequestError(f"stop must be a list of non-empty strings, not {shown(value)}")
    if len(value) > MOST_STOPS:
        raise RequestError(f"stop may have up to {MOST_STOPS} strings, not {len(value)}")
    if (longest := max(map(len, value), default=0)) > LONGEST_STOP:
        raise RequestError(f"stop may have strings of up to {LONGEST_STOP} characters, not {longest}")
    return tuple(value)


def _stop_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(
        isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in value
    ):
        raise RequestError(f"stop_token_ids must be a list of token ids, not {shown(value)}")
    if len(value) > MOST_STOP_TOKENS:
        raise RequestError(f"stop_token_ids may have up to {MOST_STOP_TOKENS} tokens, not {len(value)}")
    return tuple(value)


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
        seed: Tokens are a function of (model, prompt, seed) alone: see `docs/method.md`.
        stop: Strings that end the text; the text is cut before the first one. Up to 16, of up to 1000 characters each.
        stop_token_ids: Tokens that end the text as the end-of-sequence token does, also with `ignore_eos`. Up to 256.
        ignore_eos: Generate on past the end-of-sequence token.

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

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            _integer("max_new_tokens", self.max_new_tokens, 1)
        if self.top_k is not None:
            _integer("top_k", self.top_k, 0)
        for name, low, high, low_open in _NUMBERS:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _number(name, value, low, high, low_open=low_open))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        _integer("seed", self.seed, 0)
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, not {shown(self.ignore_eos)}")

    def over(self, defaults: ResolvedSampling | None = None) -> ResolvedSampling:
        """Fill in the settings that are None from `defaults`."""
        if isinstance(self, ResolvedSampling):
            return self
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(defaults or ResolvedSampling(), **{"logprobs": None, **given})


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

    Args:
        prompt_ids: Token ids of the prompt, at least one.
        sampling: Sampling settings and stop conditions.
        request_id: The caller's name for it; comes back in `Generation`.
        timeout: Seconds from submission until it ends with `RequestTimeoutError`; None for no limit.
        may_teach: Allow online learning from its text; otherwise the text never leaves the engine for a learner.

    Raises:
        RequestError: `timeout` is not a finite number above 0.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    timeout: float | None = None
    may_teach: bool = True

    def __post_init__(self) -> None:
        if self.timeout is not None:
            _number("timeout", self.timeout, 0.0, math.inf, low_open=True)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a generated token under the target model, before penalties, bias and temperature.

    Args:
        top: (token, log-probability) of the most probable tokens at its position, in falling order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Timing:
    """Seconds from a request's submission.

    Args:
        queued: Until it entered a slot; None if it never did.
        first_token: Until its first token; None if there was none.
        total: Until its end.
    """

    queued: float | None = None
    first_token: float | None = None
    total: float = 0.0


@dataclass(frozen=True)
class Generation:
    """Result of a `Request`.

    Args:
        token_ids: New tokens, the end-of-sequence token included where it was chosen.
        text: `token_ids` decoded without special tokens, cut before the stop string.
        finish_reason: `stop` (end of sequence or stop string), `length` (limit reached), `cancelled`, or `error`, which
            only `SpeculativeLM` gives, for a prompt that could not be generated.
        counts: Raw speculation counts; ratios are derived in `drafter.statistics` only.
        logprobs: Of each of `token_ids`; None unless requested.
        verifier: Name of the verifier that accepted draft tokens.
        lossless: Whether that verifier guarantees the tokens of plain decoding.
        lenient: Indices in `token_ids` of tokens that the target model would not have chosen; empty if lossless.
        drafter_versions: Versions of a learning head whose draft tokens were verified, in order; else empty.
        error: Why there is no text; None where there is.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    counts: DecodeCounts
    logprobs: list[TokenLogprob] | None = None
    timing: Timing = Timing()
    verifier: str = "exact"
    lossless: bool = True
    lenient: list[int] = field(default_factory=list)
    drafter_versions: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """New tokens a decode step, 0 if there was no step; as in the column of a job's output."""
        return mean_acceptance_length(self.counts)


@dataclass(frozen=True)
class TokenDelta:
    """Tokens that one decode step added to a request, for streaming.

    Args:
        token_ids: The accepted draft tokens and the bonus token.
        text: New text; characters with missing bytes, and possible beginnings of a stop string, are held back.
        accepted: How many of `token_ids` were drafted.
        logprobs: Of each of `token_ids`; None unless requested.
    """

    token_ids: list[int]
    text: str
    accepted: int
    logprobs: list[TokenLogprob] | None = None
