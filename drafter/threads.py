"""Where torch computes on a CPU: in one thread only.

GNU's OpenMP gives every thread that computes a pool of workers for as long as it lives. Workers of a single pool wait
for the next operation by spinning; as soon as all pools together have more of them than there are cores, they sleep
after each operation instead. With small operations a step then takes four times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_passing_thread(work: Callable[[], Result]) -> Result:
    """Do something in a thread that ends with it, and takes its pool of workers along.

    Raises:
        Exception: Whatever `work` raises.
    """
    with ThreadPoolExecutor(1, "passing") as thread:
        return thread.submit(work).result()
