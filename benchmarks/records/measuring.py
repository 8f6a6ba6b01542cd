"""The measurement: this engine under schemas and without, and the share of its steps that schemas take."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from jsonschema import Draft202012Validator

from benchmarks.records.texts import SCHEMAS, Task
from drafter.acceptance import choices
from drafter.acceptance.guide import FirstGuides
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.engine import Engine
from drafter.evaluation.decoders import Run, decode_all, room_for
from drafter.evaluation.questions import encode
from drafter.parts import steering
from drafter.parts.guide import GuidePart
from drafter.requests import Request, SamplingParams
from drafter.structured_outputs import StructuredOutputs
from drafter.target_model.model import BaseModel

MOST_TOKENS = 256
"""New tokens of a record at most. One that does not end within them is not valid."""


@dataclass(frozen=True)
class Arm:
    """A way to decode the job by this engine: with a `drafter`, under the schemas or `free`.

    A free answer has as many tokens as the record, whatever they are.
    """

    name: str
    drafter: str
    free: bool = False


FREE = Arm("plain, no schema", "none", free=True)
PLAIN = Arm("plain", "none")


@dataclass(frozen=True)
class Cell:
    """A run of the whole job at a batch size; the tokens that end a text are left out.

    `steps`, `drafted` and `accepted` are summed over the rows. Other engines do not tell them.
    """

    arm: str
    batch: int
    round: int
    seconds: float  # prefills included
    records: int
    valid: int  # records that their schemas accept
    tokens: int
    forced: int = 0  # tokens about which the schema left no choice
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Share:
    """Seconds of an arm's steps at a batch size, and those in them that the schemas take, by what is done there."""

    arm: str
    batch: int
    steps: float  # without prefills
    trees: float  # draft trees are cut and lengthened
    masks: float  # masks of their nodes are computed
    choices: float  # masks are applied to logits
    output: float  # guides go on by new tokens


@dataclass(frozen=True)
class Job:
    """The tasks for a target model, and the tokens of plain decoding's records once they are known."""

    base: BaseModel
    tokenizer: Any
    tasks: Sequence[Task]

    def requests(self, lengths: Sequence[int] = ()) -> list[Request]:
        """Return the requests under schemas; free ones of these `lengths` if they are given."""
        prompts = [encode(self.tokenizer, [{"role": "user", "content": one.prompt}]) for one in self.tasks]
        if lengths:
            free = (SamplingParams(length, 0.0, ignore_eos=True) for length in lengths)
            return [Request(prompt, one) for prompt, one in zip(prompts, free, strict=True)]
        return [
            Request(prompt, SamplingParams(MOST_TOKENS, 0.0, structured_outputs=StructuredOutputs(json=one.schema)))
            for prompt, one in zip(prompts, self.tasks, strict=True)
        ]

    def decode(self, arm: Arm, batch: int, lengths: Sequence[int] = ()) -> Run:
        """Decode the job by a new engine, which knows no text yet but has compiled the schemas."""
        requests = self.requests(lengths if arm.free else ())
        drafter = load_drafter(arm.drafter, self.base, useful_nodes(self.base.device))
        engine = Engine(self.base, drafter, self.tokenizer, room_for(requests, batch), drafter_name=arm.drafter)
        first = requests[: len(SCHEMAS)]  # one of each kind
        decode_all(engine, [replace(one, sampling=replace(one.sampling, max_new_tokens=1)) for one in first])
        return decode_all(engine, requests)

    def valid(self, texts: Sequence[str]) -> int:
        """Return how many texts are records that their schemas accept."""
        return sum(_is_valid(text, task.schema) for text, task in zip(texts, self.tasks, strict=True))


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def cell_of(job: Job, arm: Arm, batch: int, turn: int, run: Run) -> Cell:
    """Return the cell of a run."""
    counts, valid = run.counts, job.valid([one.text for one in run.generations])
    return Cell(
        arm.name,
        batch,
        turn,
        run.seconds,
        len(run.outputs),
        valid,
        run.num_tokens,
        sum(one.num_forced_tokens for one in counts),
        sum(one.num_decode_steps for one in counts),
        sum(one.num_draft_tokens for one in counts),
        sum(one.num_accepted_draft_tokens for one in counts),
    )


def measure_turn(job: Job, arms: Sequence[Arm], batch: int, turn: int, expected: list[list[int]]) -> Iterator[Cell]:
    """Decode the job by all arms.

    Args:
        expected: Tokens of the records, by plain decoding.

    Raises:
        AssertionError: An arm gives other tokens, or a record that has ended and is not valid.
    """
    for arm in arms:
        run = job.decode(arm, batch, [len(tokens) for tokens in expected])
        cell = cell_of(job, arm, batch, turn, run)
        if not arm.free and run.outputs != expected:
            raise AssertionError(f"{arm.name} gave other tokens: batch {batch}")
        if not arm.free and cell.valid < sum(one.finish_reason == "stop" for one in run.generations):
            raise AssertionError(f"{arm.name} gave a record that its schema refuses: batch {batch}")
        yield cell


def share_of(job: Job, arm: Arm, batch: int) -> Share:
    """Decode the job once more, with a clock at everything that is done for schemas."""
    with _clocked() as spent:
        run = job.decode(arm, batch)
    steps = sum(run.stages.values()) - run.stages["prefill"]
    return Share(arm.name, batch, steps, spent["trees"], spent["masks"], spent["choices"], spent["output"])


@contextmanager
def _clocked() -> Iterator[dict[str, float]]:
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        return run

    with ExitStack() as stack:
        for owner, attribute, name in (
            (steering, "steered", "trees"),
            (steering, "masks", "masks"),
            (choices, "likeliest_allowed", "choices"),
            (GuidePart, "after_token", "output"),
        ):
            stack.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        yield spent


def compile_seconds(base: BaseModel, tokenizer: Any) -> dict[str, float]:
    """Return the seconds in which the tokeniser is read, and each schema compiled."""
    guides = FirstGuides(tokenizer, base.vocab_size, base.eos_token_ids)
    # The first guide of all takes the time to read the tokeniser, whatever it is asked for.
    asked = {"tokeniser": StructuredOutputs(choice=("a",))}
    asked |= {kind: StructuredOutputs(json=schema) for kind, schema in SCHEMAS.items()}
    found = {}
    for name, one in asked.items():
        began = time.perf_counter()
        guides.guide(one, ())
        found[name] = time.perf_counter() - began
    return found
