"""Rows that are programs: a function of the user asks the job's engine as often as it likes, and returns columns.

The feeder and the ledger treat a program as they treat a request: it enters an engine, and leaves it with an outcome.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from drafter.engine.handle import Handle
from drafter.errors import RequestError, RequestTimeoutError, one_line, shown
from drafter.many import with_settings
from drafter.prompt import Prompt
from drafter.requests import Generation, Request, SamplingParams, Timing, sample_seed
from drafter.statistics import total
from pipeline.errors import RowError
from pipeline.generate.prompts import Encoder, PromptSettings, call_prompt
from pipeline.generate.row_requests import asked_of, row_sampling
from pipeline.generate.staging import BYTES
from pipeline.generate.user_functions import rollout_function
from pipeline.io.parts import pack, unpack, with_problems
from pipeline.io.reading import refuse_deep
from pipeline.output.columns import MOST_PROGRAM_COLUMNS, PROGRAM, OutputColumn, RunTraits, column_values, slot_seconds
from pipeline.settings import SAMPLING_COLUMN

if TYPE_CHECKING:
    from drafter.llm import SpeculativeLM

PROGRAM_SECONDS = 3600.0
"""Bound of a program where `limits.row_seconds` is not set: a program may wait for what never comes."""
MOST_CALLS = 1 << 20
"""Calls of an engine's programs that may wait for a slot."""


def to_programs(block: pa.Table, settings: PromptSettings) -> pa.Table:
    return pack((part, make_programs(rows, settings)) for part, rows in unpack(block))


def make_programs(rows: pa.Table, settings: PromptSettings) -> pa.Table:
    """Replace `seed_name` of staged rows by `sampling`, the settings of their programs' calls as JSON."""
    problems = rows["problem"].to_pylist()
    samplings: list[str | None] = [None] * rows.num_rows
    for index, name, asked, sample in asked_of(rows, settings):
        try:
            found = row_sampling(settings.sampling, name, asked, SAMPLING_COLUMN, sample)
        except RowError as error:
            problems[index] = vars(error.problem)
        else:
            samplings[index] = json.dumps(asdict(found))
    rows = with_problems(rows, problems).drop_columns(["seed_name"])
    return rows.append_column("sampling", pa.array(samplings, pa.string()))


@dataclass(frozen=True)
class ProgramRow:
    """A row for a program. `sampling` has the row's seed, and what its calls do not set themselves."""

    request_id: str
    row: dict[str, Any]
    sampling: SamplingParams
    prompt_ids: Sequence[int] = ()  # none is known before the program has run


def _bytes(value: dict[str, Any]) -> Any:
    """Return the bytes that an object stands for; one of the row's own that looks like that stays as it is."""
    if value.keys() != {BYTES}:
        return value
    try:
        return base64.b64decode(value[BYTES], validate=True)
    except (TypeError, ValueError):
        return value


@dataclass(frozen=True)
class Rollout:
    """What an engine needs of a job's programs; see `Programs`.

    Args:
        function: `module:function`.
        prompts: How prompts of calls are made: as those of the job's rows.
        seconds: A program that takes longer is its row's error.
        taken: Names of columns that a program cannot return.
    """

    function: str
    prompts: PromptSettings
    seconds: float
    taken: frozenset[str]

    def rows(self, rows: pa.Table) -> dict[str, ProgramRow]:
        """Return the rows of `make_programs` that have no problem, by name."""
        columns = (rows[name].to_pylist() for name in ("request_id", "asked", "sampling"))
        return {
            name: ProgramRow(name, json.loads(asked, object_hook=_bytes), SamplingParams(**json.loads(sampling)))
            for name, asked, sampling in zip(*columns, strict=True)
            if sampling is not None
        }

    def values(
        self, answer: ProgramAnswer, row: ProgramRow, traits: RunTraits, columns: Sequence[OutputColumn]
    ) -> dict[str, Any]:
        """Return the output columns of a program: the sums over its calls, and what it returned."""
        generation = summed(row.request_id, [one for _, one in answer.calls])
        if answer.valid is not None:
            generation = replace(generation, valid=answer.valid)
        values = column_values(generation, Request((), row.sampling, row.request_id), traits, columns)
        return values | {"num_calls": len(answer.calls), PROGRAM: answer.columns}

    def starter(self, lm: SpeculativeLM) -> Callable[[ProgramRow], Program]:
        """Return what starts the program of a row, in this process. The function must be importable here, too."""
        function, sees = rollout_function(self.function), self.prompts.images is not None
        encoder = Encoder(lm.tokenizer, lm.processor if sees else None)

        def prompt(asked: Mapping[str, Any]) -> Prompt:
            return call_prompt(asked, self.prompts, encoder)

        return lambda row: Program(self, function, row, prompt, lm.submit)


@dataclass(frozen=True)
class ProgramAnswer:
    """What a program came to: `columns` are the JSON text of those that it returned, but for its own `valid`."""

    columns: str
    valid: bool | None
    calls: list[tuple[Request, Generation]]


class Program:
    """A program under way; like a `Handle` it has a `future` and a `result`.

    It runs in a thread with an event loop of its own, so that one that blocks keeps neither the engine nor others.
    """

    def __init__(
        self,
        rollout: Rollout,
        function: Callable[..., Any],
        row: ProgramRow,
        prompt: Callable[[Mapping[str, Any]], Prompt],
        submit: Callable[[Request], Handle],
    ) -> None:
        self._rollout, self._function, self._row, self._prompt, self._submit = rollout, function, row, prompt, submit
        self.future: Future[ProgramAnswer] = Future()
        self.future.set_running_or_notify_cancel()
        self._settled = threading.Lock()
        self._number = 0
        self._calls: dict[int, tuple[Request, Generation]] = {}
        self._open: set[Handle] = set()
        self._loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[Any] | None = None
        self._timer = threading.Timer(rollout.seconds, self._time_up)
        self._timer.daemon = True
        self._timer.start()
        threading.Thread(target=self._run, name=f"program {row.request_id}", daemon=True).start()

    def result(self) -> ProgramAnswer:
        """Return what it came to.

        Raises:
            RowError: It failed, or returned what is no columns.
            RequestTimeoutError: Its time was up.
            EngineError: The engine failed, whatever the program made of that.
        """
        return self.future.result()

    def _run(self) -> None:
        try:
            columns, valid = self._checked(asyncio.run(self._main()))
        except RowError as error:
            self._settle(error)
        except BaseException as error:  # whatever the user's function does
            self._settle(self._failed(f"failed in {_place(error, self._function)}: {_said(error)}"))
        else:
            self._settle(ProgramAnswer(columns, valid, [self._calls[number] for number in sorted(self._calls)]))

    async def _main(self) -> Any:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await self._function(self._row.row, self._generate)

    def _settle(self, result: ProgramAnswer | BaseException) -> None:
        # The first one counts: a program whose time is up may go on for ever.
        if not self._settled.acquire(blocking=False):
            return
        self._timer.cancel()
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)

    def _time_up(self) -> None:
        seconds = f"limits.row_seconds, {self._rollout.seconds:g}"
        self._settle(RequestTimeoutError(f"{self._named} had not ended after {seconds}"))
        for handle in list(self._open):
            handle.cancel()
        if self._task is not None:  # its thread ends, unless it blocks
            with suppress(RuntimeError):  # it has ended just now, with its loop
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _generate(
        self,
        prompt: Any,
        *,
        images: Sequence[Any] = (),
        tools: Any = None,
        documents: Any = None,
        chat_template_kwargs: Any = None,
        **sampling: Any,
    ) -> Awaitable[Generation]:
        """Ask the engine: what programs call as `generate`.

        Calls have their numbers, and so their seeds, in the order in which they are made, not that of their ends.

        Args:
            prompt: Messages, token ids, or a text, which is a user's message as in a row.
            images: As in a row's column of images: those without a place in the messages.
            tools: This and the next two go to the chat template.
            sampling: Fields of `SamplingParams`, which go before the row's and the job's.

        Raises:
            RequestError: The prompt or a setting cannot be used.
        """
        beside = {"tools": tools, "documents": documents, "chat_template_kwargs": chat_template_kwargs}
        number, self._number = self._number, self._number + 1
        return self._answer(number, {"prompt": prompt, "images": list(images) or None, **beside}, sampling)

    async def _answer(self, number: int, asked: Mapping[str, Any], settings: Mapping[str, Any]) -> Generation:
        if self.future.done():
            raise asyncio.CancelledError
        seed = sample_seed(self._row.sampling.seed, number)
        sampling = with_settings(replace(self._row.sampling, seed=seed), settings)
        try:
            prompt = self._prompt(asked)
        except RowError as error:
            raise RequestError(str(error)) from error
        request = Request(prompt, sampling, f"{self._row.request_id}/{number}")
        try:
            handle = self._submit(request)
            self._open.add(handle)
            try:
                answer = await handle.outcome()
            finally:
                self._open.discard(handle)
                if not handle.future.done():  # the program waits for it no longer
                    handle.cancel()
        except RequestError:
            raise
        except Exception as error:  # the engine failed: another one begins the program again
            self._settle(error)
            raise
        if self.future.done():
            raise asyncio.CancelledError
        self._calls[number] = request, answer
        return answer

    @property
    def _named(self) -> str:
        return f"row {self._row.request_id}: {self._rollout.function}"

    def _failed(self, why: str) -> RowError:
        return RowError("ProgramFailed", f"{self._named} {why}")

    def _checked(self, columns: Any) -> tuple[str, bool | None]:
        """Return the columns but `valid` as JSON text, and that."""
        if not isinstance(columns, dict) or not all(isinstance(name, str) and name for name in columns):
            raise self._failed(f"returned {shown(columns)}, and not a dict of columns by name")
        columns = dict(columns)
        valid = columns.pop("valid", None)
        if not isinstance(valid, bool | None):
            raise self._failed(f"returned {shown(valid)} as valid, which is True, False or None")
        if len(columns) > MOST_PROGRAM_COLUMNS:
            many = f"{len(columns):,} columns, and up to {MOST_PROGRAM_COLUMNS:,} are kept"
            raise self._failed(f"returned {many}: put what differs from row to row into one, such as a dict")
        for name in columns:
            if name in self._rollout.taken:
                raise self._failed(f"returned a column {name!r}, which the row has already: give it another name")
            try:
                text = json.dumps({name: columns[name]}, ensure_ascii=False)
                text.encode()  # of the name, too, which may have half a character
                refuse_deep(json.loads(text), text, "it")
            except (TypeError, ValueError, RecursionError) as error:
                raise self._failed(f"returned a column {name!r} that JSON cannot hold: {one_line(error)}") from error
        return json.dumps(columns, ensure_ascii=False), valid


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    """Return where an error was raised: the last line in the file of a program, if there is one."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if code is not None and one.filename == code.co_filename]
    return f"line {own[-1].lineno}" if own else f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"


def _said(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {one_line(error)}"
    except BaseException as another:  # the user's class says it
        return f"{name}, which cannot say why: {type(another).__name__}"


def summed(name: str, calls: Sequence[Generation]) -> Generation:
    """Return calls as one generation. It was cut if one of them was, and is as valid as the last record among them."""
    return Generation(
        name,
        [token for one in calls for token in one.token_ids],
        "",
        "length" if any(one.finish_reason == "length" for one in calls) else "stop",
        sum(one.num_prompt_tokens for one in calls),
        total(one.counts for one in calls),
        timing=Timing(queued=0.0, total=sum(map(slot_seconds, calls))),
        lossless=all(one.lossless for one in calls),
        verifier=calls[-1].verifier if calls else "exact",
        lenient=[place for one in calls for place in one.lenient],
        valid=next((one.valid for one in reversed(calls) if one.valid is not None), None),
        drafter_versions=[version for one in calls for version in one.drafter_versions],
        num_cached_tokens=sum(one.num_cached_tokens for one in calls),
    )
