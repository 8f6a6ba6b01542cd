""""""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from pipeline.serving.work_limits import LargeWork, Turns


def test_turns_are_given_in_order_and_not_to_those_who_have_gone() -> None:
    async def scene() -> list[tuple[str, bool]]:
        turns: Turns[str] = Turns(2.0)
        given: list[tuple[str, bool]] = []
        taken = {}
        for name in ("at once", "too", "first", "gone", "second"):
            taken[name] = turns.take(name)
            taken[name].add_done_callback(lambda turn, name=name: given.append((name, turn.result())))  # type: ignore[misc]
        assert turns.last == "second"
        turns.forget("gone")
        await asyncio.gather(*taken.values())
        assert turns.last is None
        return given

    given = asyncio.run(scene())
    assert sorted(given[:3]) == [("at once", True), ("gone", False), ("too", True)]
    assert given[3:] == [("first", True), ("second", True)]


def test_large_work_is_done_one_piece_at_a_time_and_not_for_those_who_have_gone() -> None:
    async def scene() -> tuple[list[str], int]:
        done, stops = list[str](), list[None]()
        first_is_on, go_on = threading.Event(), threading.Event()
        large = LargeWork(stop=lambda: stops.append(None))

        def work(name: str) -> str:
            if name == "first":
                first_is_on.set()
                go_on.wait()
            done.append(name)
            return name

        tasks = [asyncio.create_task(large.run("", partial(work, name))) for name in ("first", "gone", "third")]
        await asyncio.to_thread(first_is_on.wait)
        tasks[0].cancel()  # what cannot be stopped is done
        tasks[1].cancel()
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert not done, done
        go_on.set()
        assert await tasks[2] == "third"
        return done, len(stops)

    assert asyncio.run(scene()) == (["first", "third"], 1)


def test_clients_take_turns_at_large_work() -> None:
    async def scene() -> list[str]:
        large, done = LargeWork(lambda: 0.0), list[str]()
        names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        tasks = [asyncio.create_task(large.run(name[0], partial(done.append, name))) for name in names]
        await asyncio.sleep(0)  # all of them wait, and the first one has its turn
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    assert asyncio.run(scene()) == ["a1", "a2", "b1", "c1", "b2", "a4"]


def test_who_goes_at_its_turn_passes_it_on() -> None:
    async def scene() -> list[str]:
        large, done = LargeWork(), list[str]()
        gone, other = (asyncio.create_task(large.run(name, partial(done.append, name))) for name in ("gone", "other"))
        large._busy = True  # both wait behind another
        await asyncio.sleep(0)
        large._end("first", 0.0)
        gone.cancel()  # it has the turn, and has not heard of it
        await other
        return done

    assert asyncio.run(scene()) == ["other"]


def test_a_client_rests_after_its_large_work_by_processor_time_and_others_do_not_wait() -> None:
    async def scene() -> tuple[list[str], dict[str, float]]:
        spent, done = [0.0], list[str]()
        large = LargeWork(lambda: spent[0])

        def work(name: str, seconds: float) -> None:
            spent[0] += seconds
            done.append(name)

        await large.run("a", partial(work, "a1", 1e9))  # no clock gets there
        waiting = asyncio.create_task(large.run("a", partial(work, "a2", 0.0)))
        for name in ("b1", "b2"):
            await large.run("b", partial(work, name, 0.0))
        left = {client: end - asyncio.get_running_loop().time() for client, end in large._rested.items()}
        large._rested.clear()
        await large.run("c", partial(work, "c1", 0.001))  # and afterwards whoever has rested
        await large.run("c", partial(work, "c2", 0.0))
        await waiting
        return done, left

    done, left = asyncio.run(scene())
    assert done[:4] == ["a1", "b1", "b2", "a2"]
    assert done[4:] == ["c1", "c2"]
    assert left["a"] == pytest.approx(3e9, rel=1e-3)
