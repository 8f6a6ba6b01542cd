"""Measures drafters side by side in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

from drafter.drafters.contract import Drafter
from drafter.drafters.names import kind_and_rest, merged_names
from drafter.drafters.registry import TRAINING_FREE, head_drafter, load_drafter, useful_nodes
from drafter.embedded import EMBEDDED_HEADS, embedded_heads
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import Decoder, Run, decode_all, differing_tokens, in_turns, room_for, warm_up
from drafter.evaluation.environment import environment
from drafter.evaluation.forced import Answers, ForcedAcceptance, known_answers
from drafter.evaluation.questions import Prompt, Question, check_batches, prompts_of
from drafter.evaluation.results import PLAIN, STAGES, Arm, Cell, Plan, Results, Setting, Skipped, StageSums
from drafter.heads.checkpoint import load_head
from drafter.heads.contract import DraftHead
from drafter.statistics import DecodeCounts, total
from drafter.target_model.architecture import fingerprint
from drafter.target_model.model import BaseModel


@dataclass(frozen=True)
class Progress:
    """Progress at one setting: `done` of `total` turns of all arms."""

    setting: Setting
    done: int
    total: int


class Evaluation:
    """Measures a plan on named sets of questions.

    Raises `LoadError` if a drafter cannot be loaded, or no drafter has one of the plan's trees, and `QuestionError` if
    a set has fewer prompts than the largest batch has rows.
    """

    def __init__(
        self, base: BaseModel, tokenizer: Any, questions: Mapping[str, Sequence[Question]], plan: Plan
    ) -> None:
        self._base, self._tokenizer, self._plan = base, tokenizer, plan
        self._questions = {name: [one for one in some for _ in range(plan.samples)] for name, some in questions.items()}
        for name, some in questions.items():
            check_batches(name, some, plan.samples, plan.batches)
        self._heads = {name: head for name in plan.drafters if (head := _load_head(name, base)) is not None}
        self._arms: list[Arm] = []
        self._skipped: list[Skipped] = []
        for name, tree in product(plan.drafters, plan.trees):
            arms = [Arm(name, tree, nodes, plan.acceptance) for nodes in plan.num_draft_tokens]
            try:
                self._drafter(arms[0])
            except ValueError as error:
                if tree == "exact":
                    raise
                self._skipped.append(Skipped(name, tree, str(error)))
            else:
                self._arms += arms
        if not self._arms:
            raise LoadError(f"there is nothing to measure: {self._skipped[0].reason} (trees: {', '.join(plan.trees)})")

    def describe(self, command: str, files: Mapping[str, str]) -> Results:
        """Return results without cells. `command` repeats the evaluation, `files` names the file of each set."""
        questions = {
            name: {
                "file": files[name],
                "questions": len(some) // self._plan.samples,
                "prompts": sum(len(question.turns) for question in some),
                "fingerprint": hashlib.sha256(repr(list(some)).encode()).hexdigest()[:16],
                "categories": sorted({question.category for question in some if question.category}),
            }
            for name, some in self._questions.items()
        }
        heads = {name: head_record(head) for name, head in self._heads.items()}
        return Results(environment(self._base, command), asdict(self._plan), questions, heads, list(self._skipped))

    def run(self, done: Collection[Setting] = ()) -> Iterator[list[Cell] | Progress]:
        """Measure, except settings in `done`. Yields progress, and the cells of all arms when a setting is done.

        Raises `QuestionError` if a question does not fit the target model.
        """
        plan = self._plan
        settings = ((t, batch, name) for batch, t, name in product(plan.batches, plan.temperatures, self._questions))
        left = [setting for setting in settings if setting not in done]
        sizes = {"max_new_tokens": plan.max_new_tokens, "slots": max(plan.batches)}
        prompts = {
            (t, name): prompts_of(self._base, self._tokenizer, self._questions[name], temperature=t, **sizes)
            for t, name in dict.fromkeys((t, name) for t, _, name in left)
        }
        for setting in left:
            yield from self._measured(setting, prompts[setting[0], setting[2]])

    def _measured(self, setting: Setting, prompts: Sequence[Prompt]) -> Iterator[list[Cell] | Progress]:
        """Measure a setting with engines of its own. They and their caches are freed afterwards.

        A drafter that stores texts would have seen those of other settings, but not of ones done by an earlier job.
        """
        batch, rounds = setting[1], self._plan.rounds
        requests, decoders = [one.request for one in prompts], self._decoders(batch, prompts)
        portions = [[request] for request in requests] if batch == 1 else [requests]
        for turn, runs in enumerate(in_turns(decoders, portions, rounds), start=1):  # noqa: B007 - read below
            yield Progress(setting, turn, rounds * len(portions))
        yield [_cell_of(setting, arm, runs[arm], prompts) for arm in decoders]

    def _decoders(self, batch: int, prompts: Sequence[Prompt]) -> dict[Arm, Decoder]:
        """Return decoders of all arms that can decode `prompts`, warmed up."""
        decoders: dict[Arm, Decoder] = {}
        requests, answers = [one.request for one in prompts], known_answers(prompts)
        for arm in (PLAIN, *self._arms):
            nodes = "auto" if arm.nodes is None else arm.nodes
            config = room_for(requests, batch, num_draft_tokens=nodes, compile=self._plan.compile)
            engine = Engine(self._base, self._drafter(arm, answers), self._tokenizer, config)
            decoders[arm] = partial(decode_all, engine)
        for decode in decoders.values():
            warm_up(decode, requests, batch)
        return decoders

    def _drafter(self, arm: Arm, answers: Answers | None = None) -> Drafter:
        """Return a new drafter for an arm, which knows the answers if its acceptance is forced.

        Raises `ValueError` if the drafter has no such tree.
        """
        drafter = self._own_drafter(arm)
        return drafter if arm.acceptance is None else ForcedAcceptance(drafter, answers or {}, arm.acceptance)

    def _own_drafter(self, arm: Arm) -> Drafter:
        if arm.nodes is None:
            return load_drafter(arm.drafter, self._base, 0)
        nodes = useful_nodes(self._base.device) if arm.nodes == "auto" else arm.nodes
        if arm.drafter in self._heads:
            return head_drafter(self._heads[arm.drafter], self._base, nodes, arm.tree or "exact")
        if arm.tree != "exact":
            raise ValueError(f"only a draft head has a {arm.tree} tree")
        return load_drafter(arm.drafter, self._base, nodes)


def _stage_sums(runs: Sequence[Run]) -> StageSums:
    spent = {stage: sum(run.stages[stage] for run in runs) for stage in (*STAGES, "wait")}
    spent["verify"] += spent.pop("wait")
    return StageSums(spent, sum(run.num_tokens for run in runs))


def _cell_of(setting: Setting, arm: Arm, rounds: Sequence[Sequence[Run]], prompts: Sequence[Prompt]) -> Cell:
    temperature, batch, questions = setting
    counts: dict[str, list[DecodeCounts]] = {}
    by_prompt = [DecodeCounts() for _ in prompts]
    differing = 0
    for runs in rounds:
        outputs = [output for run in runs for output in run.outputs]
        differing += sum(differing_tokens(o, p.answer) for o, p in zip(outputs, prompts, strict=True))
        for place, one in enumerate(c for run in runs for c in run.counts):
            counts.setdefault(prompts[place].category, []).append(one)
            by_prompt[place] = total([by_prompt[place], one])
    return Cell(
        questions,
        batch,
        temperature,
        arm,
        tokens=[[run.num_tokens for run in runs] for runs in rounds],
        seconds=[[round(run.seconds, 6) for run in runs] for runs in rounds],
        differing_tokens=differing,
        counts={category: total(some) for category, some in counts.items()},
        stages=_stage_sums([run for runs in rounds for run in runs]),
        tokens_by_prompt=[one.num_output_tokens for one in by_prompt],
        steps_by_prompt=[one.num_decode_steps for one in by_prompt],
        question_by_prompt=[one.question for one in prompts],
    )


def head_record(head: DraftHead) -> dict[str, Any]:
    """Return the description of a head that is stored with its measurements."""
    return {
        "algorithm": head.algorithm,
        "config": vars(head.config),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "weights": fingerprint(head, [head.algorithm]),
        "training": dict(head.provenance.training) if head.provenance is not None else {},
    }


def _load_head(name: str, base: BaseModel) -> DraftHead | None:
    """Return the head of that name; None for a drafter that is not a single head."""
    if name in embedded_heads():
        return load_head(EMBEDDED_HEADS / name, base)
    if name == "auto" or name in TRAINING_FREE or kind_and_rest(name)[0] or len(merged_names(name)) > 1:
        return None
    return load_head(name, base)
