"""Batches come to their ends whatever happens on the way, by answers that are made up here."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.batches import runner
from pipeline.batches.config import BatchesConfig
from pipeline.batches.lines import InputLines, Line
from pipeline.batches.records import ENDED, BatchRecord, FileRecord, new_id
from pipeline.batches.runner import AnswerLine, Batches
from pipeline.openai.errors import INTERRUPTED, OpenAIError, to_json
from tests.pipeline.batches.test_lines import CHAT, line
from tests.support.waiting import PATIENCE

HOUR = 3600


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_WAIT", "_LONGEST_WAIT", "_LOOK_SECONDS"):
        monkeypatch.setattr(runner, name, 0.01)


def answered(number: int, text: str = "") -> tuple[int, str]:
    usage = {"prompt_tokens": 1, "completion_tokens": number, "prompt_tokens_details": {"cached_tokens": 0}}
    return 200, to_json({"text": f"{text}{number}", "usage": usage})


def refused(status: int, code: str) -> tuple[int, str]:
    return status, to_json(OpenAIError(status, "No.", code=code).body())


class Engine:
    """Answers lines when it is told to, and notes in which order it got them."""

    def __init__(self, answer: Callable[[str, int], Awaitable[tuple[int, str]]] | None = None) -> None:
        self.asked: list[tuple[str, int]] = []
        self.open = asyncio.Event()
        self._answer = answer

    async def __call__(self, path: str, body: bytes, client: str) -> tuple[int, str]:
        assert path == CHAT
        number = json.loads(body)["number"]
        self.asked.append((client, number))
        if self._answer is not None:
            return await self._answer(client, number)
        await self.open.wait()
        return answered(number)


@asynccontextmanager
async def running(
    folder: Path, answer: AnswerLine, at_once: int = 2, clock: Callable[[], float] | None = None, **limits: int
) -> AsyncIterator[Batches]:
    given = {} if clock is None else {"clock": clock}
    batches = Batches(BatchesConfig(str(folder), **limits), answer, at_once, **given)
    task = asyncio.create_task(batches.run())
    try:
        await until(lambda: is_ready(batches))
        yield batches
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def is_ready(batches: Batches) -> bool:
    try:
        batches.check_ready()
    except OpenAIError:
        return False
    return True


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def begin(batches: Batches, count: int, owner: str = "", lines: list[Any] | None = None) -> BatchRecord:
    now = batches.clock()
    file = FileRecord(new_id("file-", now), owner, "lines", "batch", 0, int(now))
    rows = [line(number) for number in range(count)] if lines is None else lines
    batches.files.put(file, [to_json(one).encode() + b"\n" for one in rows])
    record = BatchRecord(new_id("batch_", now), owner, CHAT, file.id, "1h", int(now), int(now) + HOUR)
    await batches.create(record)
    return record


async def ended(batches: Batches, record: BatchRecord) -> dict[str, Any]:
    """Wait for the end of a batch; return it with the lines of its files."""
    await until(lambda: batches.records.find(record.owner, record.id).status in ENDED)
    found: dict[str, Any] = batches.described(batches.records.find(record.owner, record.id))
    for kind in ("output", "error"):
        name = found[f"{kind}_file_id"]
        text = batches.files.content(name).read_text() if name else ""
        found[kind] = [json.loads(one) for one in text.splitlines()]
    return found


def texts(found: dict[str, Any]) -> list[str]:
    return [one["response"]["body"]["text"] for one in found["output"]]


def test_all_lines_are_answered_in_order_and_counted(tmp_path: Path) -> None:
    async def answer(_: str, number: int) -> tuple[int, str]:
        await asyncio.sleep(0.001 * (number % 3))
        return refused(400, "bad") if number == 4 else answered(number)

    async def main() -> None:
        async with running(tmp_path, Engine(answer), at_once=3) as batches:
            record = await begin(batches, 8)
            found = await ended(batches, record)
            assert found["status"] == "completed"
            assert found["request_counts"] == {"total": 8, "completed": 7, "failed": 1}
            assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (7, 0 + 1 + 2 + 3 + 5 + 6 + 7)
            assert texts(found) == [str(number) for number in (0, 1, 2, 3, 5, 6, 7)]
            [error] = found["error"]
            assert (error["custom_id"], error["response"]["status_code"]) == ("row 4", 400)
            assert {"in_progress_at", "finalizing_at", "completed_at"} <= {k for k, v in found.items() if v}
            await until(lambda: [one.name for one in batches.records.folder(record.id).iterdir()] == ["about.json"])

    asyncio.run(main())


def test_a_process_goes_on_where_another_was_killed(tmp_path: Path) -> None:
    """Each line is in the output once, and none that was kept is answered again."""

    async def main() -> None:
        copy, first, seen = tmp_path / "killed", Engine(), Counter[int]()

        async def some(_: str, number: int) -> tuple[int, str]:
            if number < 5:
                return answered(number, "first ")
            await asyncio.Event().wait()
            raise AssertionError

        first = Engine(some)
        async with running(tmp_path / "whole", first, at_once=3) as batches:
            record = await begin(batches, 12)
            await until(lambda: batches.described(record)["request_counts"]["completed"] == 5)  # type: ignore[index]
            shutil.copytree(tmp_path / "whole", copy)  # the folder as a kill at this moment leaves it
        (copy / "lease.json").unlink()
        with (copy / "batches" / record.id / "results").open("ab") as stream:
            stream.write(b"7 200 1 0")

        async def rest(_: str, number: int) -> tuple[int, str]:
            seen[number] += 1
            return answered(number, "second ")

        async with running(copy, Engine(rest)) as batches:
            found = await ended(batches, record)
        assert seen == Counter(range(5, 12))
        assert texts(found) == [f"{'first' if number < 5 else 'second'} {number}" for number in range(12)]

    asyncio.run(main())


@pytest.mark.parametrize("status", ["validating", "finalizing", "cancelling"])
def test_a_process_goes_on_from_every_status(tmp_path: Path, status: Any) -> None:
    async def main() -> None:
        engine = Engine()
        async with running(tmp_path, engine) as batches:
            record = await begin(batches, 3)
            engine.open.set()
            folder = batches.records.folder(record.id)
            await until(lambda: [one.name for one in folder.iterdir()] == ["about.json"])
            # As it was on the way to there: a kill may come before or after any of the writes.
            (folder / "input.jsonl").write_bytes(batches.files.content(record.input_file_id).read_bytes())
            batches.records.save(record.at(status, 1.0))
        async with running(tmp_path, engine) as batches:
            found = await ended(batches, record)
        wanted = {"validating": "completed", "finalizing": "expired", "cancelling": "cancelled"}
        assert found["status"] == wanted[status]
        assert len(found["output"]) == (3 if status == "validating" else 0)
        assert len(found["error"]) == (3 if status == "finalizing" else 0)

    asyncio.run(main())


def test_what_is_done_when_a_batch_is_cancelled_is_delivered(tmp_path: Path) -> None:
    async def some(_: str, number: int) -> tuple[int, str]:
        if number >= 2:
            await asyncio.Event().wait()
        return answered(number)

    async def main() -> None:
        engine = Engine(some)
        async with running(tmp_path, engine) as batches:
            record = await begin(batches, 9)
            await until(lambda: len(engine.asked) == 4)
            await until(lambda: batches.described(record)["request_counts"]["completed"] == 2)  # type: ignore[index]
            assert (await batches.cancel(record)).status == "cancelling"
            found = await ended(batches, record)
            assert (found["status"], texts(found), found["error_file_id"]) == ("cancelled", ["0", "1"], None)
            assert found["request_counts"] == {"total": 9, "completed": 2, "failed": 0}
            assert len(engine.asked) == 4
            with pytest.raises(OpenAIError, match="Cannot cancel a batch with status 'cancelled'") as refusal:
                await batches.cancel(record)
            assert refusal.value.status == 409

    asyncio.run(main())


def test_the_rest_of_a_batch_that_expires_are_error_lines(tmp_path: Path) -> None:
    async def some(_: str, number: int) -> tuple[int, str]:
        if number >= 2:
            await asyncio.Event().wait()
        return answered(number)

    async def main() -> None:
        now = 1000.0
        async with running(tmp_path, Engine(some), clock=lambda: now) as batches:
            record = await begin(batches, 5)
            await until(lambda: batches.described(record)["request_counts"]["completed"] == 2)  # type: ignore[index]
            now += HOUR - 1
            await asyncio.sleep(0.1)
            assert batches.records.find("", record.id).status == "in_progress"
            now += 1
            found = await ended(batches, record)
        assert (found["status"], found["expired_at"], texts(found)) == ("expired", 1000 + HOUR, ["0", "1"])
        assert [(one["custom_id"], one["error"]["code"]) for one in found["error"]] == [
            (f"row {number}", "batch_expired") for number in (2, 3, 4)
        ]
        assert found["request_counts"] == {"total": 5, "completed": 2, "failed": 3}

    asyncio.run(main())


def test_a_batch_that_expired_while_no_server_ran_asks_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        now, engine = 1000.0, Engine()
        async with running(tmp_path, engine, clock=lambda: now) as batches:
            record = await begin(batches, 3)
            await until(lambda: len(engine.asked) == 2)
        now += 2 * HOUR
        async with running(tmp_path, engine, clock=lambda: now) as batches:
            found = await ended(batches, record)
        assert (found["status"], len(found["error"]), len(engine.asked)) == ("expired", 3, 2)

    asyncio.run(main())


def test_a_full_disk_delays_a_batch_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch does not suffer either; and the batch says what it waits for."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        engine = Engine()
        async with running(tmp_path, engine, at_once=12) as batches:
            records = [await begin(batches, 8, owner) for owner in ("one", "two")]
            await until(lambda: len(engine.asked) == 12)
            with monkeypatch.context() as patch:
                patch.setattr("os.fsync", full)
                engine.open.set()
                for record in records:
                    await until(lambda record=record: batches.described(record)["errors"])  # type: ignore[misc]
                    problem = batches.described(record)["errors"]["data"][0]  # type: ignore[index]
                    assert problem["code"] == "storage_error"
                    assert "No space left on device" in problem["message"]
                asked = len(engine.asked)
                await asyncio.sleep(0.1)
                assert len(engine.asked) == asked == 12  # nothing is begun that could not be kept
            for record in records:
                found = await ended(batches, record)
                assert (found["status"], found["errors"], len(found["output"])) == ("completed", None, 8)
        assert len(engine.asked) == 16

    asyncio.run(main())


def test_a_line_that_cannot_be_read_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = InputLines.read

    def some(self: InputLines, number: int) -> Line:
        if number == 1:
            raise ValueError("Out of range float values are not JSON compliant")
        return read(self, number)

    monkeypatch.setattr(InputLines, "read", some)

    async def main() -> None:
        engine = Engine()
        engine.open.set()
        async with running(tmp_path, engine) as batches:
            found = await ended(batches, await begin(batches, 3))
        assert (found["status"], texts(found)) == ("completed", ["0", "2"])
        [error] = found["error"]
        assert (error["custom_id"], error["response"]["status_code"]) == (None, 500)

    asyncio.run(main())


def test_lines_wait_where_replicas_have_no_room(tmp_path: Path) -> None:
    async def main() -> None:
        tries = Counter[int]()

        async def busy(_: str, number: int) -> tuple[int, str]:
            tries[number] += 1
            return answered(number) if tries[number] > 5 else refused(429 if number % 2 else 503, "later")

        async with running(tmp_path, Engine(busy)) as batches:
            found = await ended(batches, await begin(batches, 4))
        assert found["request_counts"] == {"total": 4, "completed": 4, "failed": 0}

    asyncio.run(main())


def test_only_the_line_that_ends_replicas_fails(tmp_path: Path) -> None:
    """Those that were answered beside it are answered again; a line under suspicion has no other one beside it."""

    async def main() -> None:
        beside: set[int] = set()
        deaths = Counter[int]()

        async def answer(client: str, number: int) -> tuple[int, str]:
            if deaths[number]:
                assert not beside
            beside.add(number)
            died = False
            try:
                for _ in range(5):
                    await asyncio.sleep(0.002)
                    died |= number == 3 or 3 in beside
                if died:
                    deaths[number] += 1
                    return refused(503, INTERRUPTED)
                return answered(number)
            finally:
                beside.discard(number)

        async with running(tmp_path, Engine(answer), at_once=4) as batches:
            found = await ended(batches, await begin(batches, 10))
        assert deaths[3] == 3
        assert max(count for number, count in deaths.items() if number != 3) == 1
        assert found["request_counts"] == {"total": 10, "completed": 9, "failed": 1}
        assert found["error"][0]["custom_id"] == "row 3"
        assert found["error"][0]["response"]["status_code"] == 503

    asyncio.run(main())


def test_owners_take_turns_and_a_batch_follows_another_of_its_owner(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Engine()

        async def one_by_one(path: str, body: bytes, client: str) -> tuple[int, str]:
            await engine.open.wait()
            await asyncio.sleep(0)
            return await engine(path, body, client)

        async with running(tmp_path, one_by_one, at_once=1) as batches:
            records = [
                await begin(batches, count, owner, [line(number) for number in range(first, first + count)])
                for owner, count, first in (("one", 6, 0), ("one", 2, 10), ("two", 3, 0))
            ]
            await until(lambda: len(batches._runs) == 3)
            engine.open.set()
            for record in records:
                await ended(batches, record)
        turns = [owner for owner, _ in engine.asked]
        assert turns[1:7] in (["two", "one"] * 3, ["one", "two"] * 3)
        assert [number for owner, number in engine.asked if owner == "one"] == [0, 1, 2, 3, 4, 5, 10, 11]

    asyncio.run(main())


def test_two_servers_do_not_run_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits, says so, and goes on when the first one has ended."""
    monkeypatch.setattr(runner, "BEAT_SECONDS", 1.0)

    async def main() -> None:
        engines = [Engine(), Engine()]
        async with running(tmp_path, engines[0]) as first:
            record = await begin(first, 4)
            await until(lambda: len(engines[0].asked) == 2)
            second = Batches(first.config, engines[1], 2)
            waiting = asyncio.create_task(second.run())
            await until(lambda: "another server" in second._reason)
            with pytest.raises(OpenAIError, match="because another server works on their folder") as refusal:
                second.check_ready()
            assert refusal.value.status == 503
        engines[1].open.set()
        try:
            await until(lambda: is_ready(second))
            assert (await ended(second, record))["status"] == "completed"
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert len(engines[1].asked) == 4

    asyncio.run(main())


def test_a_file_that_is_deleted_is_no_loss_for_its_batch(tmp_path: Path) -> None:
    async def main() -> None:
        engine = Engine()
        async with running(tmp_path, engine) as batches:
            record = await begin(batches, 3)
            batches.files.forget(batches.files.find("", record.input_file_id))
            engine.open.set()
            assert (await ended(batches, record))["status"] == "completed"

    asyncio.run(main())
