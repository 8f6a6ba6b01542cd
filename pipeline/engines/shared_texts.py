"""Sharing of texts between engines of a job, for their drafters' memories."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drafter.drafters.text_queue import Text, TextQueue
from drafter.errors import one_line
from drafter.prompt import Prompt
from drafter.requests import Generation, Request
from pipeline.command_line import say
from pipeline.io.files import Location
from pipeline.output.columns import PROMPT_IMAGES
from pipeline.progress.watch import Pulse

if TYPE_CHECKING:  # a driver uses this module without an engine
    from drafter.drafters.contract import TextMemory

_COLUMNS = ("prompt_token_ids", "token_ids")


def earlier_texts(data: Location, tokens: int) -> list[Text]:
    """Return the newest prompts with answers that have up to `tokens` tokens together, oldest first.

    Unreadable files are skipped: drafts are not worth a failure.
    """
    found: list[Text] = []
    for text in _newest_first(data):
        tokens -= len(text)
        if tokens < 0:
            break
        found.append(text)
    return found[::-1]


def _newest_first(data: Location) -> Iterator[Text]:
    try:
        files = data.parquets().values()
    except OSError as error:
        say(f"{data.path} is not remembered: {one_line(error)}")
        return
    for info in sorted(files, key=lambda info: (info.mtime_ns or 0, info.path), reverse=True):
        try:
            with data.filesystem.open_input_file(info.path) as stream:
                file = pa.parquet.ParquetFile(stream)
                names = set(file.schema_arrow.names)
                if not set(_COLUMNS) <= names:
                    continue
                for group in reversed(range(file.num_row_groups)):
                    yield from _texts(file.read_row_group(group, [*_COLUMNS, *names & {PROMPT_IMAGES}]))[::-1]
        except (OSError, pa.ArrowException) as error:
            say(f"{info.path} is not remembered: {one_line(error)}")


def _texts(rows: pa.Table) -> list[Text]:
    prompts, answers = (_split(rows[name]) for name in _COLUMNS)
    if PROMPT_IMAGES in rows.column_names:
        ends = [max((span["stop"] for span in spans or ()), default=0) for spans in rows[PROMPT_IMAGES].to_pylist()]
        prompts = [prompt[end:] for prompt, end in zip(prompts, ends, strict=True)]
    return [np.concatenate(parts) for parts in zip(prompts, answers, strict=True)]


def _split(column: pa.ChunkedArray) -> list[npt.NDArray[np.int32]]:
    lengths = pa.compute.fill_null(pa.compute.list_value_length(column), 0).to_numpy()
    flat = pa.compute.list_flatten(column).to_numpy().astype(np.int32)
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


_KEPT_TOKENS = 1 << 18  # far more than the engines of a node generate between two exchanges


def _after_images(request: Request) -> int:
    """Return where the text behind a prompt's images begins: placeholders of others' images are no text."""
    spans = request.prompt.spans if isinstance(request.prompt, Prompt) else ()
    return spans[-1].stop if spans else 0


class NodeTexts:
    """Keeps the newest texts of a node's engines. Run as a Ray actor, but independent of Ray."""

    def __init__(self, capacity: int = _KEPT_TOKENS) -> None:
        self._capacity = capacity
        self._kept: deque[tuple[int, str, Text]] = deque()
        self._tokens = self._said = 0
        self._seen: dict[str, int] = {}

    def exchange(self, engine: str, said: Sequence[Text]) -> list[Text]:
        """Add an engine's texts, and return the other engines' texts since its last call, if that was not its first."""
        first = self._seen.get(engine, self._said)
        others = [text for number, who, text in self._kept if number >= first and who != engine]
        for text in said:
            self._kept.append((self._said, engine, text))
            self._said += 1
            self._tokens += len(text)
        while self._tokens > self._capacity:
            self._tokens -= len(self._kept.popleft()[2])
        self._seen[engine] = self._said
        return others


def texts_of_node(run: str) -> Any:
    """Return the `NodeTexts` actor of this node and job, made on first use."""
    node = ray.get_runtime_context().get_node_id()
    name = f"texts-{hashlib.sha256(run.encode()).hexdigest()[:16]}-{node}"
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "name": name, "get_if_exists": True, "scheduling_strategy": here}
    return ray.remote(**options)(NodeTexts).remote()


_PULSE_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_UNTOLD_TOKENS = 1 << 16  # that wait to be sent to the other engines; older ones are dropped


@dataclass(frozen=True)
class OtherTexts:
    """Sources of texts besides an engine's own rows: the output's files, and the node's other engines."""

    data: Location | None
    shared: bool


class MemoryFeed:
    """Adds other processes' texts to the memories of an engine's drafters, in threads."""

    def __init__(
        self,
        memories: Sequence[TextMemory],
        others: OtherTexts,
        run: str,
        connect: Callable[[str], Any] = texts_of_node,
    ) -> None:
        self._memories, self._others, self._run, self._connect = memories, others, run, connect
        self._room = max((one.memory.room for one in memories), default=0)  # tokens
        self._name = uuid.uuid4().hex
        self._said = TextQueue(_UNTOLD_TOKENS)
        self._actor: Any = None
        self._pulse = Pulse(_PULSE_SECONDS, self.exchange)

    def start(self) -> None:
        if self._room:
            threading.Thread(target=self.refill, name="refill", daemon=True).start()
            if self._others.shared:
                self._pulse.start()

    def finished(self, generation: Generation, request: Request) -> None:
        if self._others.shared and self._room:
            self._said.put([[*request.prompt_ids[_after_images(request) :], *generation.token_ids]])

    def refill(self) -> None:
        if self._others.data is not None:
            self._remember(earlier_texts(self._others.data, self._room))

    def exchange(self) -> None:
        """Send new texts, and add the others' to the memory; do nothing while the actor does not answer."""
        try:
            if self._actor is None:
                self._actor = self._connect(self._run)
            said = self._said.take(_UNTOLD_TOKENS)
            texts = ray.get(self._actor.exchange.remote(self._name, said), timeout=_ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return  # it is still being started, or has much to do; without this handle Ray would end it
        except (ray.exceptions.RayError, ValueError):  # it has died, or is being made by another engine
            self._actor = None
            return
        if texts:
            self._remember(texts)

    def _remember(self, texts: Sequence[Text]) -> None:
        for one in self._memories:
            one.remember(texts)
