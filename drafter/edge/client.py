"""`EdgeLM`: generates with a target model on a server, which verifies what this device drafts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from drafter.drafters.contract import Drafter
from drafter.drafters.registry import TRAINING_FREE, load_drafter
from drafter.edge.drafting import Drafting, DraftTree, NoTarget
from drafter.edge.link import Link, LinkClosedError
from drafter.edge.messages import Close, Error, Message, Open, Opened, Verified
from drafter.errors import EngineError, LoadError, RequestError
from drafter.half_characters import refuse_half_characters
from drafter.plugins import registered
from drafter.requests import Generation, SamplingParams, TokenDelta
from drafter.statistics import DecodeCounts
from drafter.text.conversation import Conversation, Messages
from drafter.text.text_stream import TextStream, read_output
from drafter.text.tokenizers import load_tokenizer, tokenise, vocabulary_digest

Prompt = str | Sequence[int] | Messages | Conversation

_NODES = 16  # draft tokens that a device grows at a time; the server says how many a message may have
_AHEAD = 2  # times as many it keeps, while a message is under way
_LENGTH = 8192  # most tokens of a text behind which it drafts
_OF_SESSIONS = ("ended", "idle", "replaced", "too_many_sessions")
_PASSING = {*_OF_SESSIONS, "generation_interrupted", "model_unavailable", "rate_limit_exceeded"}
"""Codes of errors after which the same session may be opened again."""
_PAUSE = 0.2  # seconds between two tries to connect


@dataclass(frozen=True)
class EdgeDelta(TokenDelta):
    """Tokens that the server has confirmed, and what the device expects behind all confirmed ones.

    Each `unconfirmed` takes the place of the one before: tokens that the server chooses otherwise go.
    """

    unconfirmed: list[int] = field(default_factory=list)
    unconfirmed_text: str = ""


class EdgeLM:
    """A target model on a server, and a drafter on this device. It has one text at a time.

    Args:
        url: The server's, such as `http://host:8000`.
        draft_model: Folder or hub id of a small causal LM with the target's tokeniser; or a drafter that needs no
            target model, by its name, which is the default; or one that is loaded.
        tokenizer: The target's, by folder or hub id; by default the draft model's.
        key: Bearer key, if the server asks for one.
        model: The server's name of the model, if it has several.
        confidence: Draft tokens are sent whose path is at least so probable by the drafter.
        timeout: Seconds to wait for an answer before the message is sent again, and then over a new connection.
        patience: Seconds of this device's silence after which the server goes on by itself; None for never.
        alone: Go on with this device's own tokens while the server does not answer, until it does.
        give_up: Seconds without an answer after which a text fails.
        device: Where the drafter runs.

    Raises:
        LoadError: The draft model or the tokeniser cannot be loaded or do not go together.
    """

    def __init__(
        self,
        url: str,
        draft_model: str | Path | Drafter | None = None,
        *,
        tokenizer: Any = None,
        key: str | None = None,
        model: str | None = None,
        confidence: float = 0.2,
        timeout: float = 5.0,
        patience: float | None = None,
        alone: bool = False,
        give_up: float = 60.0,
        device: str = "cpu",
    ) -> None:
        self.url, self.key, self.model, self.confidence = url, key, model, confidence
        self.timeout, self.patience, self.alone, self.give_up = timeout, patience, alone, give_up
        name = draft_model
        if name is None:
            name = next(one for one, role in registered("automatic").items() if role == "merged")
        if isinstance(name, str | Path) and ":" not in str(name) and str(name) not in TRAINING_FREE:
            tokenizer = tokenizer if tokenizer is not None else str(name)
            name = f"model:{name}"
        if tokenizer is None:
            raise LoadError("there is no draft model whose tokenizer to use: set tokenizer to the target model's")
        by_name = isinstance(tokenizer, str | Path)
        self.tokenizer = load_tokenizer(tokenizer) if by_name else tokenizer
        self.digest = vocabulary_digest(self.tokenizer)
        target = NoTarget(str(tokenizer) if by_name else "", len(self.tokenizer), torch.device(device))
        drafter = name if isinstance(name, Drafter) else load_drafter(name, target, _NODES, isolated=True)
        self.drafting = Drafting(drafter, target, _LENGTH)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | Mapping[str, Any] | None = None, **settings: Any
    ) -> EdgeStream:
        """Start one prompt: `for` yields `EdgeDelta`s, `.result()` returns the result. As `SpeculativeLM.stream`.

        Without a temperature it is greedy, and without `max_new_tokens` up to 256 tokens.

        Raises:
            RequestError: The prompt or a setting cannot be used.
        """
        given = vars(sampling) if isinstance(sampling, SamplingParams) else sampling or {}
        try:
            chosen = SamplingParams(**{**given, **settings})
        except TypeError as error:
            raise RequestError(str(error)) from error
        if chosen.logprobs is not None:
            raise RequestError("a server does not send log-probabilities to a device: leave out logprobs")
        settings = _body(chosen) | ({} if self.model is None else {"model": self.model})
        if isinstance(prompt, str):
            refuse_half_characters(prompt)
            asked = {"prompt": list(tokenise(self.tokenizer, [prompt])["input_ids"][0])}
        elif isinstance(prompt, Conversation):
            asked = {name: value for name, value in vars(prompt).items() if value is not None}
        elif prompt and isinstance(prompt[0], Mapping):
            asked = {"messages": list(prompt)}
        else:
            asked = {"prompt": [int(token) for token in cast(Sequence[int], prompt)]}
        return EdgeStream(self, asked, settings, chosen)

    def generate(
        self, prompt: Prompt, sampling: SamplingParams | Mapping[str, Any] | None = None, **settings: Any
    ) -> Generation:
        """Generate for one prompt, and wait; see `stream`."""
        return self.stream(prompt, sampling, **settings).result()


def _body(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling settings as a request's body has them."""
    unset = vars(SamplingParams())
    body = {name: value for name, value in vars(sampling).items() if value != unset[name]}
    body |= {"seed": sampling.seed, "temperature": sampling.temperature or 0.0}
    body["max_tokens"] = body.pop("max_new_tokens", 256)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in dict(sampling.logit_bias).items()}
    if (asked := sampling.structured_outputs) is not None:
        body["structured_outputs"] = {asked.kind: getattr(asked, asked.kind)}
    return body


class EdgeStream:
    """A text under way; see `EdgeLM.stream`.

    Attributes:
        session: Its name at the server.
        output: Confirmed tokens.
    """

    def __init__(self, lm: EdgeLM, prompt: dict[str, Any], settings: dict[str, Any], sampling: SamplingParams) -> None:
        self._lm, self._asked, self._settings, self._sampling = lm, prompt, settings, sampling
        self.session = secrets.token_hex(16)
        self.output: list[int] = []
        self.counts = DecodeCounts()
        self._prompt: list[int] = prompt.get("prompt", [])
        self._tree, self._seq, self._most = DraftTree(), 0, _NODES
        self._finished: str | None = None
        self._link: Link | None = None
        self._silent = 0  # times that no answer came, in a row
        self._progress = time.monotonic()  # when the server last answered
        self._said: TextStream | None = None  # once the prompt is known, which may have begun with reasoning
        self._shown = 0  # characters that have been handed out
        self._deltas = self._run()

    def __iter__(self) -> Iterator[EdgeDelta]:
        return self._deltas

    def close(self) -> None:
        """Leave the text, and free its place at the server."""
        self._deltas.close()

    def result(self) -> Generation:
        """Wait for the end, and return the result, without what only the server knows: `valid`, `forced` and `timing`.

        Raises `RequestError` if the server refuses the request, and `EngineError` if the server has not answered for
        too long.
        """
        for _ in self._deltas:
            pass
        if self._finished is None:
            raise EngineError("the text was left before its end")
        said = self._text().whole()
        return Generation(
            request_id="",
            token_ids=self.output,
            text=said.text,
            reasoning_content=said.reasoning,
            finish_reason=self._finished,  # type: ignore[arg-type]
            num_prompt_tokens=len(self._prompt),
            counts=self.counts,
        )

    # ---- the loop

    def _run(self) -> Generator[EdgeDelta, None, None]:
        try:
            while self._finished is None:
                answered = self._link is not None and self._link.opened
                try:
                    if self._link is None:
                        self._link = Link(self._lm.url, self._lm.key)
                    yield from self._ask()
                except LinkClosedError as error:
                    self._drop()
                    self._refuse_if_over(str(error))
                    if self._go_alone():
                        yield self._delta([], 0)
                    if not answered:
                        time.sleep(_PAUSE)
        finally:
            if self._link is not None:
                with suppress(LinkClosedError):  # the text is complete, or nobody wants it
                    self._link.send(Close())
            self._drop()

    def _ask(self) -> Iterator[EdgeDelta]:
        """Send what is drafted, or open the session first, and take what comes until the text has grown."""
        assert self._link is not None
        if not self._link.opened:
            request = {**self._settings, **self._asked}
            # The prompt is the same wherever the session is opened again.
            prompt = None if "prompt" in request or not self._prompt else tuple(self._prompt)
            self._link.send(Open(self.session, self._lm.digest, request, tuple(self.output), self._lm.patience, prompt))
            asked = 0
        else:
            if not len(self._tree):
                self._grow()
            self._seq += 1
            draft = self._tree.draft(self._seq, len(self.output), self._most)
            self._link.send(draft)
            asked = len(draft.tokens)
            if asked:
                yield self._delta([], 0)
        again, growing = time.monotonic() + self._lm.timeout, self._link.opened
        lonely = self._lm.alone and self._silent > 0
        while (left := again - time.monotonic()) > 0:
            growing = growing and len(self._tree) < _AHEAD * self._most
            message = self._link.receive(0 if growing or lonely else left)
            if message is not None:
                if (delta := self._take(message, asked)) is not None:
                    yield delta
                    return
                if self._finished is not None:
                    return
            elif growing:
                growing = self._grow()  # drafts on while the message is under way
            elif lonely and (lonely := self._go_alone()):
                yield self._delta([], 0)
        self._silent += 1
        self._refuse_if_over("it does not answer")
        if self._silent > 1:
            self._drop()

    def _take(self, message: Message, asked: int) -> EdgeDelta | None:
        """Act on a message; return what it adds to the text, if anything."""
        assert self._link is not None
        match message:
            case Opened(most=most, prompt=prompt):
                self._link.opened, self._most = True, most
                if prompt is not None:
                    self._prompt = list(prompt)
            case Verified():
                pass
            case Error(code=code, message=reason, seq=seq):
                if code == "gap" or (seq is None and code in _PASSING):
                    raise LinkClosedError(reason)  # and the session is opened again
                raise RequestError(reason)
            case _:
                return None
        self._progress = time.monotonic()
        self._silent = 0
        known = len(self.output) - message.at
        if not 0 <= known <= len(message.tokens):
            return None
        new = list(message.tokens[known:])
        self._finished = message.finished
        if not new and self._finished is None:
            return self._delta([], 0) if isinstance(message, Opened) else None
        accepted = max(message.accepted - known, 0) if isinstance(message, Verified) else 0
        self._tree = self._tree.after(new)
        self.output += new
        if new:
            self.counts.record_step(emitted=len(new), accepted=accepted, drafted=asked)
        return self._delta(new, accepted)

    def _grow(self, *, alone: bool = False) -> bool:
        """Draft behind the best of what is drafted; False if nothing more is likely."""
        if not self._prompt:
            return False
        path = self._tree.best_path()
        text = [*self._prompt, *self.output, *(self._tree.tokens[node] for node in path)]
        tree = self._lm.drafting.tree(text, 0.0 if alone else self._lm.confidence)
        if alone:  # one chain: the likeliest token after the other
            tree = tree.best(1)
        self._tree.graft(path[-1] if path else -1, tree)
        return bool(len(tree))

    def _go_alone(self) -> bool:
        """Add a token of this device's own, if it may; False if not, or if the text is as long as it may be."""
        left = self._settings["max_tokens"] - len(self.output) - len(self._tree.best_path())
        return self._lm.alone and left > 0 and self._grow(alone=True)

    # ---- the connection

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _refuse_if_over(self, reason: str) -> None:
        if time.monotonic() - self._progress > self._lm.give_up:
            raise EngineError(f"the server at {self._lm.url} cannot go on with the text: {reason}")

    # ---- text

    def _delta(self, new: list[int], accepted: int) -> EdgeDelta:
        if not self._prompt:  # and so no tokens
            return EdgeDelta(new, "", accepted)
        said, over = self._text(), self._finished is not None
        for token in new:
            said.push(token)
        # At a stop string the server says a little later that it ends there.
        more = said.rest() if over or said.found else said.new()
        reasoning = more.reasoning or ""
        self._shown += len(reasoning) + len(more.text)
        if over or said.found:
            return EdgeDelta(new, more.text, accepted, reasoning_content=reasoning)
        expected = [self._tree.tokens[node] for node in self._tree.best_path()]
        endless = replace(self._sampling, stop=())
        whole = read_output(self._lm.tokenizer, self._prompt, [*self.output, *expected], endless)
        behind = f"{whole.reasoning or ''}{whole.text}"[self._shown :]
        return EdgeDelta(
            new, more.text, accepted, reasoning_content=reasoning, unconfirmed=expected, unconfirmed_text=behind
        )

    def _text(self) -> TextStream:
        if self._said is None:
            self._said = TextStream(self._lm.tokenizer, self._prompt, self._sampling)
        return self._said
