"""Response bodies and events of streams in OpenAI's schema, with an extension on draft statistics.

A body asks for it with `"speculation": true`. The answer then has a field `speculation`: in a chunk of a stream the
statistics of its step; in the last chunk of a choice, and in each choice of another answer, those of the whole.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from drafter.requests import Generation, TokenDelta, TokenLogprob
from drafter.statistics import statistics_columns
from pipeline.openai.errors import OpenAIError, bad_request, not_finite, to_json
from pipeline.openai.requests import ParsedRequest
from pipeline.openai.tool_calls import CallReader, Delta, call_chunk, read_message

FIELD = "speculation"
DONE = "data: [DONE]\n\n"
"""The last event of a stream, unless it failed."""
TokenText = Callable[[int], str]
"""Gives the text of a single token. Bytes of a partial character are surrogates, as in Python's `surrogateescape`."""
LogprobsOf = Callable[[Sequence[TokenLogprob] | None, TokenText, int], dict[str, Any] | None]
"""Formats the log-probabilities of some tokens for a choice; the number is their offset in its text."""
_SLICE = 64  # tokens of a piece of a long answer, which takes a few milliseconds at most
_HALVES = re.compile("[\udc80-\udcff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # a byte token in vocabularies of SentencePiece
_PRINTED_BYTES = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTED_BYTES} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_PRINTED_BYTES)))
}
"""Bytes as vocabularies of byte-level BPE write them, since GPT-2."""
_IMPOSSIBLE = -9999.0
"""OpenAI's log-probability of a token that is too unlikely for a number; JSON has no minus infinity."""


def wants_speculation(body: Any) -> bool:
    """Remove the extension from a body, and return whether it was asked for.

    Raises `OpenAIError` if it is neither true nor false.
    """
    value = body.pop(FIELD, None) if isinstance(body, dict) else None
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"Invalid '{FIELD}': it must be true or false.", FIELD, "invalid_type")
    return bool(value)


def generation_statistics(generation: Generation) -> dict[str, Any]:
    """Return the counts and ratios of the generation job's rows, and seconds since the request was submitted."""
    timing = generation.timing
    return {
        "num_output_tokens": len(generation.token_ids),
        **statistics_columns(generation.counts),
        "seconds_queued": timing.queued,
        "seconds_to_first_token": timing.first_token,
        "seconds": timing.total,
    }


def lossless_mark(*generations: Generation) -> dict[str, Any]:
    """Return the mark of every answer whose tokens may differ from plain decoding's; empty for others."""
    marked = [generation for generation in generations if not generation.lossless]
    if not marked:
        return {}
    lenient = sum(len(generation.lenient) for generation in marked)
    return {"lossless": False, "verifier": marked[0].verifier, "lenient_tokens": lenient}


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of a token inside a text, which may begin with a space; see `TokenText`.

    `\ufffd` stands for a partial character whose bytes the vocabulary does not tell.
    """
    # Some tokenisers leave out the space before the first word, so the second token tells.
    once, twice = (str(tokenizer.decode([token] * times, clean_up_tokenization_spaces=False)) for times in (1, 2))
    text = twice[len(once) :]
    if "\ufffd" not in text:
        return text
    known = _vocabulary_bytes(str(tokenizer.convert_ids_to_tokens(token)))
    return text if known is None else known.decode(errors="surrogateescape")


def _vocabulary_bytes(entry: str) -> bytes | None:
    if found := _BYTE_TOKEN.fullmatch(entry):
        return bytes([int(found[1], 16)])
    return bytes(_BYTES[character] for character in entry) if all(one in _BYTES for one in entry) else None


def _shown(text: str) -> str:
    return _HALVES.sub("\ufffd", text)


def answer_id(request: ParsedRequest, unique: str) -> str:
    return f"chatcmpl-{unique}" if request.is_chat else f"cmpl-{unique}"


def response(
    request: ParsedRequest,
    generations: Sequence[Generation],
    name: str,
    created: int,
    token_text: TokenText,
    prompts: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    """Return the body that answers a request, but for the log-probabilities of its prompts.

    Args:
        generations: One for each choice, in order.
        name: The answer's `id`.
        created: Seconds since 1970.
        prompts: Token ids of each choice's prompt, where the request wants them.

    Raises:
        OpenAIError: A log-probability is not a number.
    """
    logprobs_of = logprobs_format(request)
    choices = []
    for index, generation in enumerate(generations):
        said, reason = _said(request, generation, f"{name}:{index}")
        logprobs = logprobs_of(generation.logprobs, token_text, 0)
        choices.append({"index": index, **said, "logprobs": logprobs, "finish_reason": reason})
        if request.token_ids:
            choices[index]["token_ids"] = generation.token_ids
            if not request.is_chat:
                choices[index]["prompt_token_ids"] = list(prompts[index])
    return {
        **({"prompt_token_ids": list(prompts[0])} if request.token_ids and request.is_chat else {}),
        "id": name,
        "object": "chat.completion" if request.is_chat else "text_completion",
        "created": created,
        "model": request.model,
        "choices": choices,
        "usage": usage(generations, request.n),
        "system_fingerprint": None,
    }


def _said(request: ParsedRequest, generation: Generation, choice: str) -> tuple[dict[str, Any], str]:
    """Return the text or the message of a choice, and its finish reason."""
    if not request.is_chat:
        return {"text": generation.text} | _reasoning(generation.reasoning_content), generation.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": generation.text, "refusal": None}
    called = False
    if request.tools is not None and request.marks is not None:
        message, called = read_message(request.marks, request.tools.names, generation.marked or "", choice)
    return {"message": message | _reasoning(generation.reasoning_content)}, _reason(generation, called=called)


def _reasoning(text: str | None) -> dict[str, Any]:
    """Return the field of a message, a choice or a delta; none without reasoning."""
    return {"reasoning_content": text} if text else {}


def _reason(generation: Generation, *, called: bool) -> str:
    """Return a choice's finish reason; `called` if it calls functions, with all of their arguments."""
    return "tool_calls" if called and generation.finish_reason == "stop" else generation.finish_reason


def echoed(generation: Generation, prompt: str, count: int | None) -> Generation:
    """Return a generation whose text begins with its prompt; so do its log-probabilities, of `count` tokens each."""
    logprobs = generation.logprobs
    if count is not None and generation.prompt_logprobs is not None:
        of_prompt = [replace(one, top=one.top[:count]) for one in generation.prompt_logprobs]
        logprobs = [*of_prompt, *(logprobs or [])]
    return replace(generation, text=prompt + generation.text, logprobs=logprobs)


def usage(generations: Sequence[Generation], n: int = 1) -> dict[str, Any]:
    """Return the token counts. A prompt counts once, whatever its number of choices.

    Draft tokens stand where OpenAI counts those of a predicted output: rejected ones were verified for nothing.
    `generations` has `n` of each prompt, one prompt after the other.
    """
    prompt = sum(generation.num_prompt_tokens for generation in generations[::n])
    cached = sum(generation.num_cached_tokens for generation in generations[::n])
    output = sum(len(generation.token_ids) for generation in generations)
    accepted = sum(generation.counts.num_accepted_draft_tokens for generation in generations)
    drafted = sum(generation.counts.num_draft_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def logprobs_format(request: ParsedRequest) -> LogprobsOf:
    return chat_logprobs if request.is_chat else completion_logprobs


def chat_logprobs(
    logprobs: Sequence[TokenLogprob] | None, token_text: TokenText, _offset: int = 0
) -> dict[str, Any] | None:
    """Return log-probabilities of a chat's choice, or of a chunk of one; raises as `response` does."""
    if logprobs is None:
        return None

    def described(token: int, logprob: float | None) -> dict[str, Any]:
        text = token_text(token)
        known = None if "\ufffd" in text else list(text.encode(errors="surrogateescape"))
        return {"token": _shown(text), "logprob": _number(logprob), "bytes": known}

    return {
        "content": [
            {**described(one.token_id, one.logprob), "top_logprobs": [described(*other) for other in one.top]}
            for one in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(
    logprobs: Sequence[TokenLogprob] | None, token_text: TokenText, offset: int = 0
) -> dict[str, Any] | None:
    """Return log-probabilities of a text completion's choice, or of a chunk at `offset` in its text."""
    if logprobs is None:
        return None

    def by_text(top: Sequence[tuple[int, float]]) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for token, logprob in top:  # the most probable first: of tokens with one text it counts
            found.setdefault(_shown(token_text(token)), _number(logprob))
        return found

    texts = [_shown(token_text(one.token_id)) for one in logprobs]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_number(one.logprob) for one in logprobs],
        "top_logprobs": [None if one.logprob is None else by_text(one.top) for one in logprobs],
        "text_offset": offsets,
    }


def _number(logprob: float | None) -> float | None:
    """A log-probability as JSON can have it; null for the first token of a prompt."""
    if logprob is None:
        return None
    if logprob == -math.inf:
        return _IMPOSSIBLE
    if not math.isfinite(logprob):  # the target model's forward has overflowed
        raise not_finite()
    return logprob


def _prompt_logprob(one: TokenLogprob, count: int, token_text: TokenText) -> dict[str, Any] | None:
    """Return vLLM's entry of a token of a prompt: its log-probability and the `count` best, by ids; None for the first.

    It raises as `response` does.
    """
    if one.logprob is None:
        return None
    # Where it is as probable as the last of the best, and none of them, its own rank may be that one's.
    ranked = {one.token_id: (one.logprob, max(one.rank or 1, count + 1))}
    ranked |= {token: (value, rank) for rank, (token, value) in enumerate(one.top[:count], 1)}
    return {
        str(token): {"logprob": _number(value), "rank": rank, "decoded_token": _shown(token_text(token))}
        for token, (value, rank) in ranked.items()
    }


def _prompt_pieces(request: ParsedRequest, generation: Generation, token_text: TokenText) -> Iterator[str]:
    """Yield the JSON text of a prompt's log-probabilities as a field, if the request wants them."""
    found, count = generation.prompt_logprobs or [], request.prompt_logprobs
    for start in range(0, 0 if count is None else len(found), _SLICE):
        piece = to_json([_prompt_logprob(one, count or 0, token_text) for one in found[start : start + _SLICE]])
        end = "]," if start + _SLICE >= len(found) else ""
        yield ("," if start else '"prompt_logprobs":[') + piece[1:-1] + end


def long_answer(
    body: dict[str, Any], generations: Sequence[Generation], request: ParsedRequest, token_text: TokenText
) -> Iterator[str]:
    """Yield the JSON text of `body` with all log-probabilities that are wanted, which may be a hundred megabytes."""
    logprobs_of = logprobs_format(request)
    head = _open({name: value for name, value in body.items() if name != "choices"})
    for piece in _prompt_pieces(request, generations[0], token_text) if request.is_chat else ():
        yield head + piece
        head = ""
    head += '"choices":['
    for choice, generation in zip(body["choices"], generations, strict=True):
        head += _open({name: value for name, value in choice.items() if name != "logprobs"})
        for piece in () if request.is_chat else _prompt_pieces(request, generation, token_text):
            yield head + piece
            head = ""
        head += '"logprobs":'
        if generation.logprobs is None:
            head += "null},"
            continue
        lists: dict[str, list[str]] = defaultdict(list)
        others: dict[str, Any] = {}
        offset = 0
        for start in range(0, max(len(generation.logprobs), 1), _SLICE):
            some = generation.logprobs[start : start + _SLICE]
            for name, value in (logprobs_of(some, token_text, offset) or {}).items():
                if isinstance(value, list):
                    lists[name].append(to_json(value)[1:-1])
                else:
                    others[name] = value
            offset += sum(len(token_text(one.token_id)) for one in some)
            yield head
            head = ""
        joined = (f"{to_json(name)}:[{','.join(parts)}]" for name, parts in lists.items())
        head += _open(others) + ",".join(joined) + "}},"
    yield head.removesuffix(",") + "]}"


def _open(value: dict[str, Any]) -> str:
    return to_json(value)[:-1] + ("," if value else "")


def event(data: dict[str, Any]) -> str:
    return f"data: {to_json(data)}\n\n"


def error_event(error: OpenAIError) -> str:
    """Return the event that ends a failed stream."""
    return event(error.body())


class Chunks:
    """Chunks of one streamed answer, as server-sent events.

    An event with text is one decode step: the accepted draft tokens, and the target model's own token after them.

    Args:
        name: The answer's `id`.
        created: Seconds since 1970.
        speculation: Whether each chunk has draft statistics.
        prompts: As in `response`.
    """

    def __init__(
        self,
        request: ParsedRequest,
        name: str,
        created: int,
        token_text: TokenText,
        *,
        speculation: bool,
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._request, self._name, self._created, self._prompts = request, name, created, prompts
        self._token_text, self._speculation = token_text, speculation
        self._logprobs_of, self._offsets = logprobs_format(request), [0] * request.choices
        self._begun: set[int] = set()
        self._readers: list[CallReader] = []
        if request.tools is not None and request.marks is not None:
            self._readers = [CallReader(request.marks, request.tools.names) for _ in range(request.choices)]

    def step(self, index: int, delta: TokenDelta) -> str:
        """Return the chunk of one decode step of choice `index`; raises as `response` does."""
        said = self._said(index, delta)
        logprobs = self._logprobs_of(delta.logprobs, self._token_text, self._offsets[index])
        if logprobs is not None and not self._request.is_chat:
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        statistics: dict[str, Any] = {"tokens": len(delta.token_ids), "accepted": delta.accepted}
        if delta.forced:
            statistics["forced"] = delta.forced
        extension = {FIELD: statistics} if self._speculation else {}
        events, ids = self._begin(index), {"token_ids": delta.token_ids} if self._request.token_ids else {}
        for content in said or [{"delta": {}}]:
            choice = {"index": index, **content, **ids, "logprobs": logprobs, "finish_reason": None}
            events += self._chunk([choice], **extension)
            logprobs, extension, ids = None, {}, {}  # they are the step's, whose first chunk has them
        return events

    def _said(self, index: int, delta: TokenDelta) -> list[dict[str, Any]]:
        """Return what each chunk of a choice has of its new text; one chunk at least, unless it is all reasoning."""
        reasoning = _reasoning(delta.reasoning_content)
        if not self._request.is_chat:
            return [{"text": delta.text} | reasoning]
        found: list[dict[str, Any]] = [{"delta": reasoning}] if reasoning else []
        if self._readers:
            return found + self._deltas(index, self._readers[index].push(delta.marked or ""))
        return [*found, {"delta": {"content": delta.text}}] if delta.text or not found else found

    def _deltas(self, index: int, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        return [{"delta": call_chunk(delta, f"{self._name}:{index}")} for delta in deltas]

    def finish(self, index: int, generation: Generation) -> str:
        content: dict[str, Any] = {"delta": {}} if self._request.is_chat else {"text": ""}
        events, reason = self._begin(index), str(generation.finish_reason)
        if self._readers:
            for rest in self._deltas(index, self._readers[index].close()):
                events += self._chunk([{"index": index, **rest, "logprobs": None, "finish_reason": None}])
            reason = _reason(generation, called=self._readers[index].whole)
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        extension = {FIELD: generation_statistics(generation)} if self._speculation else {}
        return events + self._chunk([choice], **extension, **lossless_mark(generation))

    def end(self, generations: Sequence[Generation]) -> str:
        """Return the end of the stream, with the usage if it was asked for."""
        if not self._request.include_usage:
            return DONE
        return self._chunk([], usage=usage(generations, self._request.n)) + DONE

    def _begin(self, index: int) -> str:
        """The event before the first text of a choice: of a chat, or with the token ids of the prompt."""
        ids = {"prompt_token_ids": list(self._prompts[index])} if self._request.token_ids else {}
        if index in self._begun or not (ids or self._request.is_chat):
            return ""
        self._begun.add(index)
        if not self._request.is_chat:
            return self._chunk([{"index": index, "text": "", **ids, "logprobs": None, "finish_reason": None}])
        delta = {"role": "assistant", "content": None if self._readers else "", "refusal": None}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], **ids)

    def _chunk(self, choices: list[dict[str, Any]], **extension: Any) -> str:
        # With `include_usage` all chunks have the field, and the last one its value.
        last = {"usage": None, **extension} if self._request.include_usage else extension
        return event(
            {
                "id": self._name,
                "object": "chat.completion.chunk" if self._request.is_chat else "text_completion",
                "created": self._created,
                "model": self._request.model,
                "system_fingerprint": None,
                "choices": choices,
                **last,
            }
        )
