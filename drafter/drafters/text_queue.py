"""Bounded queue of texts between threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Text = npt.NDArray[np.int32]


class TextQueue:
    """FIFO queue of up to `capacity` tokens that drops the oldest texts and never blocks. Safe from any thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._texts: deque[Text] = deque()
        self._tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._tokens

    def put(self, texts: Sequence[Sequence[int] | Text]) -> None:
        arrays = [np.asarray(text, np.int32) for text in texts]
        with self._lock:
            self._texts.extend(arrays)
            self._tokens += sum(map(len, arrays))
            while self._tokens > self._capacity:
                self._tokens -= len(self._texts.popleft())

    def take(self, tokens: int) -> list[Text]:
        """Take texts from the front until they have `tokens` tokens, or all."""
        found: list[Text] = []
        with self._lock:
            while self._texts and tokens > 0:
                found.append(self._texts.popleft())
                tokens -= len(found[-1])
                self._tokens -= len(found[-1])
        return found
