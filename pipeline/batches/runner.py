"""Runs batches: hands their lines to the endpoint's engines, keeps what comes, and goes on after any kill."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from drafter.errors import one_line
from pipeline.batches.config import BatchesConfig
from pipeline.batches.lines import InputLines, Line, Result, Results, check_lines
from pipeline.batches.records import (
    ENDED,
    BatchRecord,
    BatchStatus,
    Counts,
    FileRecord,
    FileShelf,
    Problem,
    Shelf,
    new_id,
)
from pipeline.errors import InputError
from pipeline.io.files import locate
from pipeline.openai.errors import INTERRUPTED, OpenAIError, server_error, to_json
from pipeline.output.lease import BEAT_SECONDS, Holder, Lease

_TRIES = 3  # of a line whose replica dies with it
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0  # seconds until the next try where there is no room, on disk or at a replica
_LOOK_SECONDS = 1.0  # between two looks for batches that have expired
_INPUT, _RESULTS = "input.jsonl", "results"

AnswerLine = Callable[[str, bytes, str], Awaitable[tuple[int, str]]]
"""Answers the body of a request to a path for a client, with an HTTP status and JSON text."""
Done = TypeVar("Done")

logger = logging.getLogger("ray.serve")


class Run:
    """A batch whose lines are being answered.

    Attributes:
        ended: Set when no further line is to be answered: all are, or the batch is cancelled or has expired.
    """

    def __init__(self, record: BatchRecord, requests: InputLines, results: Results) -> None:
        self.record, self.requests, self.results = record, requests, results
        self.left = (number for number in range(len(requests)) if number not in results)
        self.ended = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.asked: set[asyncio.Task[tuple[int, str]]] = set()
        self.unsaved: list[Result] = []
        self.saving = asyncio.Lock()
        self.note_result()

    def note_result(self) -> None:
        if len(self.results) == len(self.requests):
            self.ended.set()

    def end(self) -> None:
        """Answer no further line, and give up those that are being answered."""
        self.ended.set()
        for one in self.asked:
            one.cancel()


class Batches:
    """Files and batches of all clients, in a folder that one process at a time works on.

    All is called from one event loop.

    Args:
        at_once: Lines of all batches together that are being answered.
        clock: Gives seconds since 1970.
    """

    def __init__(
        self, config: BatchesConfig, answer: AnswerLine, at_once: int, clock: Callable[[], float] = time.time
    ) -> None:
        assert config.folder is not None
        self._root = Path(config.folder).expanduser()
        self.config, self.clock = config, clock
        self.files = FileShelf(self._root / "files")
        self.records = Shelf(self._root / "batches", BatchRecord, "No batch found with id '{}'.")
        self._answer, self._at_once = answer, at_once
        self._runs: dict[str, Run] = {}
        self._troubles: dict[str, Problem] = {}  # of batches that wait for the disk
        self._tasks: set[asyncio.Future[None]] = set()
        self._saving = threading.Lock()  # of batches' records
        self._wake = asyncio.Event()
        self._served: dict[str, int] = {}  # owners, by when a line of theirs was last begun
        self._begun = count()
        self._suspects, self._alone = 0, asyncio.Lock()
        self._end: Callable[[], object] = lambda: None
        self._ready = False
        self._reason = "they are being read from disk"

    # ---- for the routes

    def check_ready(self) -> None:
        """Raise `OpenAIError` (503) while this process does not hold the folder."""
        if not self._ready:
            message = f"Files and batches cannot be used at the moment, because {self._reason}: try again later."
            raise OpenAIError(503, message, code="batches_unavailable")

    def described(self, record: BatchRecord) -> dict[str, object]:
        """Return OpenAI's object of a batch as it is now."""
        run = self._runs.get(record.id)
        counts = record.counts if run is None or record.status in ENDED else run.results.counts
        return record.public(counts, self._troubles.get(record.id))

    async def create(self, record: BatchRecord) -> None:
        """Begin a batch, with the content that its file has now. Raises `OSError`."""
        folder = self.records.folder(record.id)
        content = self.files.content(record.input_file_id)

        def write() -> None:
            folder.mkdir()
            try:
                _with_link(content, folder / _INPUT)
                self.records.save(record)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise

        await asyncio.to_thread(write)
        self._start(self._run(record))

    async def cancel(self, record: BatchRecord) -> BatchRecord:
        """Cancel a batch, and return it. Raises `OpenAIError` (409) if it has ended, or is about to; and `OSError`."""

        def save() -> BatchRecord:
            with self._saving:
                now = self._now(record)
                if now.status == "cancelling":
                    return now
                if now.status not in ("validating", "in_progress"):
                    raise OpenAIError(409, f"Cannot cancel a batch with status '{now.status}'.", code="invalid_status")
                self.records.save(now.at("cancelling", self.clock()))
                return self._now(record)

        cancelled = await asyncio.to_thread(save)
        if run := self._runs.get(record.id):
            run.end()
        return cancelled

    # ---- the life of the process

    def end(self) -> None:
        """End `run`, from any thread, because the endpoint is shutting down."""
        self._end()

    async def run(self) -> None:
        """Work on the folder whenever no other process does, until this is cancelled."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._end = partial(loop.call_soon_threadsafe, task.cancel)
        while True:
            lost = asyncio.Event()
            lease = Lease(locate(str(self._root)) / "lease.json", partial(_set_from_thread, loop, lost), BEAT_SECONDS)
            try:
                await asyncio.to_thread(self._root.mkdir, parents=True, exist_ok=True)
                await asyncio.to_thread(lease.__enter__)
            except (InputError, OSError) as error:
                self._reason = "another server works on their folder, or it cannot be used"
                logger.warning("Batches wait: %s", one_line(error))
                await asyncio.sleep(BEAT_SECONDS)
                continue
            try:
                await self._work(lost)
            finally:
                self._ready = False
                await self.stop()
                await asyncio.to_thread(lease.__exit__, None, None, None)

    async def _work(self, lost: asyncio.Event) -> None:
        await asyncio.to_thread(self.files.load)
        await asyncio.to_thread(self.records.load)
        for record in self.records:
            if record.status not in ENDED:
                self._start(self._run(record))
        self._ready = True
        self._start(self._dispatch())
        while not lost.is_set():
            for run in [one for one in self._runs.values() if self.clock() >= one.record.expires_at]:
                run.end()
            with suppress(TimeoutError):
                await asyncio.wait_for(lost.wait(), _LOOK_SECONDS)
        self._reason = "another server works on their folder"

    async def stop(self) -> None:
        """Give up all lines that are being answered; a later process begins them again."""
        tasks = [*self._tasks, *(task for run in self._runs.values() for task in run.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._runs.clear()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- one batch

    async def _run(self, record: BatchRecord) -> None:
        """Bring a batch from whatever status it has to its end."""
        try:
            folder = self.records.folder(record.id)
            is_new = record.status == "validating"
            most = self.config.lines if is_new else sys.maxsize
            check = partial(check_lines, folder / _INPUT, record.endpoint, most)
            requests, problems = await self._kept(record, check)
            if problems:
                await self._move(record, "failed", errors=problems)
                if self._now(record).status == "failed":
                    return
            total = len(requests)
            results = await self._kept(record, partial(Results, folder / _RESULTS, total, record.created_at))
            if is_new:
                await self._move(record, "in_progress", counts=Counts(total))
            run = Run(self._now(record), requests, results)
            if self._now(record).status == "in_progress":
                self._runs[record.id] = run
                if self.clock() >= record.expires_at:
                    run.end()
                self._wake.set()
                await run.ended.wait()
                await asyncio.gather(*run.tasks)
            await self._finish(run)
            self._runs.pop(record.id, None)
        except Exception:
            logger.exception("A batch cannot be run")

    async def _finish(self, run: Run) -> None:
        """Write the files of a batch's results, and end it."""
        record, results = self._now(run.record), run.results
        expired = record.status != "cancelling" and len(results) < len(run.requests)
        if record.output_file_id is None and record.error_file_id is None:  # after a kill they are written again
            ids: dict[str, str | None] = {
                "output_file_id": new_id("file-", self.clock()) if results.counts.completed else None,
                "error_file_id": new_id("file-", self.clock()) if results.counts.failed or expired else None,
            }
            await self._move(record, "finalizing", **ids)
        record = self._now(record)
        cancelled = record.status == "cancelling"
        contents = {
            "output": (record.output_file_id, results.answers),
            "error": (record.error_file_id, lambda: results.errors(run.requests, expired=expired)),
        }
        for kind, (name, pieces) in contents.items():
            if name is not None:
                title = f"{record.id}_{kind}.jsonl"
                made = FileRecord(name, record.owner, title, "batch_output", 0, int(self.clock()))
                await self._kept(record, partial(_put, self.files, made, pieces))
        counts = replace(results.counts)
        counts.failed += len(run.requests) - len(results) if expired else 0
        status: BatchStatus = "cancelled" if cancelled else "expired" if expired else "completed"
        await self._move(record, status, counts=counts)
        for name in (_INPUT, _RESULTS):
            (self.records.folder(record.id) / name).unlink(missing_ok=True)

    def _now(self, record: BatchRecord) -> BatchRecord:
        """Return a batch as it was last saved."""
        return self.records.find(record.owner, record.id)

    async def _move(self, record: BatchRecord, status: BatchStatus, **changes: object) -> None:
        """Save that a batch comes to a status; one that is being cancelled comes to no other one."""

        def save() -> None:
            with self._saving:
                now = self._now(record)
                if now.status == "cancelling" and status != "cancelled":
                    self.records.save(replace(now, **changes))  # type: ignore[arg-type]
                else:
                    self.records.save(now.at(status, self.clock(), **changes))

        await self._kept(record, save)

    async def _kept(self, record: BatchRecord, work: Callable[[], Done]) -> Done:
        """Do work on the disk in another thread, again and again until the disk takes it; the batch says so."""
        wait = _FIRST_WAIT
        while True:
            try:
                done = await asyncio.to_thread(work)
            except OSError as error:
                message = f"The server's disk fails, and the batch waits for it: {one_line(error)}."
                if record.id not in self._troubles:
                    logger.warning("%s: %s", record.id, message)
                self._troubles[record.id] = Problem("storage_error", message)
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
            else:
                self._troubles.pop(record.id, None)
                return done

    # ---- its lines

    async def _dispatch(self) -> None:
        """Begin lines while fewer than `at_once` are being answered; owners take turns."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while sum(len(run.tasks) for run in self._runs.values()) < self._at_once and not self._suspects:
                if (begun := self._next_line()) is None:
                    break
                run, number = begun
                task = asyncio.create_task(self._line(run, number))
                run.tasks.add(task)
                task.add_done_callback(run.tasks.discard)
                task.add_done_callback(lambda _: self._wake.set())

    def _next_line(self) -> tuple[Run, int] | None:
        """Return the next line of the oldest batch of the owner who has waited the longest."""
        for run in sorted(self._runs.values(), key=lambda one: (self._served.get(one.record.owner, -1), one.record.id)):
            if not run.ended.is_set() and (number := next(run.left, None)) is not None:
                self._served[run.record.owner] = next(self._begun)
                return run, number
        return None

    async def _line(self, run: Run, number: int) -> None:
        """Have a line answered, and keep the result. An error that nobody expects is the result of its line alone."""
        custom_id = None
        try:
            line = await self._kept(run.record, lambda: run.requests.read(number))
            custom_id = line.custom_id
            answered = await self._answered(run, line)
        except Exception:
            logger.exception("A line of a batch failed")
            answered = 500, to_json(server_error().body())
        if answered is None:
            return
        run.unsaved.append(Result(number, custom_id, *answered))
        async with run.saving:
            some, run.unsaved = run.unsaved, []  # also those of others that have come while the disk was busy
            if some:
                await self._kept(run.record, lambda: run.results.append(some))
        run.note_result()

    async def _answered(self, run: Run, line: Line) -> tuple[int, str] | None:
        """Return the status and body of a line's answer; None if the batch ends before.

        A line whose replica has died is a suspect: it is tried again while no other line is.
        """
        answered = None
        for tried in range(_TRIES):
            self._suspects += bool(tried)
            try:
                async with self._alone if tried else nullcontext():
                    answered = await self._ask(run, line)
            finally:
                self._suspects -= bool(tried)
                self._wake.set()
            if answered is None or not _has_code(answered, INTERRUPTED):
                break
        return answered

    async def _ask(self, run: Run, line: Line) -> tuple[int, str] | None:
        """The same of one try, which waits for as long as no replica has room."""
        wait = _FIRST_WAIT
        while not run.ended.is_set():
            asked = asyncio.ensure_future(self._answer(run.record.endpoint, line.body, run.record.owner))
            run.asked.add(asked)
            try:
                answered = await asked
            except asyncio.CancelledError:
                if run.ended.is_set() and asked.cancelled():
                    return None
                asked.cancel()
                raise
            except Exception:
                logger.exception("A line of a batch failed")
                return 500, to_json(OpenAIError(500, "The server had an error.", code=INTERRUPTED).body())
            finally:
                run.asked.discard(asked)
            if answered[0] not in (429, 503) or _has_code(answered, INTERRUPTED):
                return answered
            with suppress(TimeoutError):
                await asyncio.wait_for(run.ended.wait(), wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        return None


def _has_code(answered: tuple[int, str], code: str) -> bool:
    return answered[0] >= 500 and json.loads(answered[1])["error"]["code"] == code


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event, _: Holder) -> None:
    loop.call_soon_threadsafe(event.set)


def _put(files: FileShelf, record: FileRecord, pieces: Callable[[], Iterable[bytes]]) -> None:
    files.put(record, pieces())  # each try reads them again


def _with_link(content: Path, name: Path) -> None:
    """Give a file's content another name, so that it stays when the file is deleted."""
    try:
        os.link(content, name)
    except FileNotFoundError:
        raise
    except OSError:  # the file system has no links
        shutil.copyfile(content, name)
