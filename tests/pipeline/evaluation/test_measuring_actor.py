from __future__ import annotations

import os
import time

import pytest

from drafter.errors import LoadError
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.errors import InputError, JobError
from pipeline.evaluation.measuring import measuring


class Counter:
    """Counts what it is told.

    Args:
        start: Where it begins.
    """

    def __init__(self, start: int) -> None:
        self._count = start

    def add(self, more: int) -> int:
        if more < 0:
            raise LoadError(f"{more} cannot be added")
        self._count += more
        return self._count // more

    def die(self) -> None:
        os._exit(1)


@pytest.mark.usefixtures("local_ray")
def test_an_actor_remembers_and_its_errors_are_the_jobs() -> None:
    with measuring(ActorResources(1, 0, 1, None), Counter, 5, mistakes=(LoadError,)) as ask:
        assert [ask("add", 1), ask("add", 2)] == [6, 4]
        with pytest.raises(InputError, match=r"^-1 cannot be added$"):
            ask("add", -1)
        with pytest.raises(JobError, match=r"^ZeroDivisionError: "):
            ask("add", 0)
        assert ask("add", 4) == 3
        with pytest.raises(JobError, match=r"^ActorDiedError: "):
            ask("die")


@pytest.mark.usefixtures("local_ray")
def test_the_actor_ends_with_the_context() -> None:
    with measuring(ActorResources(1, 0, 1, None), Counter, 5, mistakes=()) as ask:
        assert ask("add", 1) == 6

    def ask_until_it_fails() -> None:  # a process that is killed may still answer for a moment
        for _ in range(600):
            ask("add", 1)
            time.sleep(0.1)

    with pytest.raises(JobError, match="ActorDiedError"):
        ask_until_it_fails()
