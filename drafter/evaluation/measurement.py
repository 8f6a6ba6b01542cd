"""Measures drafters side by side in one process, and verifiers beside exact decoding."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from typing import Any

from drafter.acceptance.contract import make_verifier
from drafter.acceptance.settings import VerifierSettings
from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.drafters.names import kind_and_rest, merged_names
from drafter.drafters.registry import TRAINING_FREE, load_drafter, useful_nodes
from drafter.embedded import EMBEDDED_HEADS
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.evaluation.decoders import (
    Run,
    decode_all,
    engine_decoder,
    in_turns,
    padding,
    transformers_decoder,
)
from drafter.evaluation.environment import environment
from drafter.evaluation.questions import Prompt, Question, check_batches, prompts_of
from drafter.evaluation.results import (
    PLAIN,
    STAGES,
    TRANSFORMERS,
    Arm,
    Cell,
    Plan,
    Results,
    Setting,
    Skipped,
    StageSums,
)
from drafter.evaluation.verifiers import VerifierFigures
from drafter.heads.checkpoint import HEADS, load_head
from drafter.heads.contract import DraftHead
from drafter.requests import Request
from drafter.statistics import DecodeCounts, per_second, total
from drafter.target.model import BaseModel

_WARM_UP_PROMPTS = 2
_WARM_UP_TOKENS = 16
_STAGE_PROMPTS = 2
"""Fewest prompts of the pass that takes stage times; a larger batch takes as many as fill it."""


@dataclass(frozen=True)
class Progress:
    """Progress at one setting: `done` of `total` turns of all arms."""

    setting: Setting
    done: int
    total: int


class Evaluation:
    """Measures a plan on named sets of questions.

    Raises:
        LoadError: A drafter cannot be loaded, or no drafter has one of the plan's trees.
        QuestionError: A set has fewer prompts than the largest batch has rows.
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
        for name in plan.drafters:
            for tree in plan.trees:
                arms = [Arm(name, tree, nodes) for nodes in plan.num_draft_tokens]
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
        # Each temperature has new engines: a drafter that stores texts would have seen answers to the same prompts.
        for (batch, _), some in groupby(left, key=lambda setting: (setting[1], setting[0])):
            yield from self._with_engines(batch, {(t, b, name): prompts[t, name] for t, b, name in some})

    def _with_engines(self, batch: int, prompts: Mapping[Setting, Sequence[Prompt]]) -> Iterator[list[Cell] | Progress]:
        """Measure settings of one batch size with the same engines. They and their caches are freed afterwards."""
        requests = {setting: [prompt.request for prompt in some] for setting, some in prompts.items()}
        longest = max(len(one.prompt_ids) for some in requests.values() for one in some) + self._plan.max_new_tokens
        queue = max(map(len, requests.values()))
        engines = {arm: self._engine(arm, batch, longest, queue) for arm in (PLAIN, *self._arms)}
        decoders = {arm: engine_decoder(engine) for arm, engine in engines.items()}
        if self._plan.transformers:
            theirs = transformers_decoder(self._base, batch, padding(self._tokenizer))
            decoders = {TRANSFORMERS: theirs} | decoders
        for decode in decoders.values():
            decode([warm_up_request(one) for one in next(iter(requests.values()))[: max(_WARM_UP_PROMPTS, batch)]])
        for setting, some in prompts.items():
            asked = requests[setting]
            portions = [[request] for request in asked] if batch == 1 else [asked]
            turns = self._plan.rounds * len(portions)
            measuring = in_turns(decoders, portions, self._plan.rounds)
            for turn in range(turns):
                runs = next(measuring)
                yield Progress(setting, turn + 1, turns)
            part = asked[: max(_STAGE_PROMPTS, batch)]
            stages = {arm: _stage_sums(engine, part) for arm, engine in engines.items()}
            yield [_cell_of(setting, arm, runs[arm], some, stages.get(arm)) for arm in decoders]

    def _engine(self, arm: Arm, batch: int, max_length: int, max_queue: int) -> Engine:
        nodes = "auto" if arm.nodes is None else arm.nodes
        config = EngineConfig(batch, max_length, nodes, self._plan.compile, max_queue)
        return Engine(self._base, self._drafter(arm), self._tokenizer, config)

    def _drafter(self, arm: Arm) -> Drafter:
        """Return a new drafter for an arm. Raises `ValueError` if the drafter has no such tree."""
        if arm.nodes is None:
            return load_drafter(arm.drafter, self._base, 0)
        nodes = useful_nodes(self._base.device) if arm.nodes == "auto" else arm.nodes
        if arm.drafter in self._heads:
            return self._heads[arm.drafter].drafter(self._base, nodes, arm.tree or "exact")
        if arm.tree == "static":
            raise ValueError("only a draft head has a static tree")
        return load_drafter(arm.drafter, self._base, nodes)


def warm_up_request(request: Request) -> Request:
    """Return a request of the same length with the prompt reversed, so that a drafter learns nothing from it."""
    tokens = min(request.sampling.over().max_new_tokens, _WARM_UP_TOKENS)
    sampling = replace(request.sampling, max_new_tokens=tokens, ignore_eos=True)
    return replace(request, prompt_ids=request.prompt_ids[::-1], sampling=sampling)


def differing_tokens(output: Sequence[int], expected: Sequence[int]) -> int:
    """Count tokens that differ from those expected at the same positions; missing tokens differ."""
    return max(len(output), len(expected)) - sum(a == b for a, b in zip(output, expected, strict=False))


def _stage_sums(engine: Engine, requests: Sequence[Request]) -> StageSums:
    """Decode requests; return the seconds by each of `STAGES`, without prefills."""
    before = engine.state().stage_seconds
    _, generations = decode_all(engine, requests)
    spent = {stage: seconds - before[stage] for stage, seconds in engine.state().stage_seconds.items()}
    spent["verify"] += spent["wait"]
    return StageSums({stage: spent[stage] for stage in STAGES}, sum(len(one.token_ids) for one in generations))


def _cell_of(
    setting: Setting, arm: Arm, rounds: Sequence[Sequence[Run]], prompts: Sequence[Prompt], stages: StageSums | None
) -> Cell:
    temperature, batch, questions = setting
    counts: dict[str, list[DecodeCounts]] = {}
    differing = 0
    for runs in rounds:
        outputs = [output for run in runs for output in run.outputs]
        differing += sum(differing_tokens(o, p.answer) for o, p in zip(outputs, prompts, strict=True))
        # transformers keeps no counts.
        for prompt, one in zip(prompts, (c for run in runs for c in run.counts), strict=False):
            counts.setdefault(prompt.category, []).append(one)
    same_draws = temperature == 0 or arm != TRANSFORMERS
    return Cell(
        questions,
        batch,
        temperature,
        arm,
        tokens=[[run.num_tokens for run in runs] for runs in rounds],
        seconds=[[round(run.seconds, 6) for run in runs] for runs in rounds],
        differing_tokens=differing if same_draws else None,
        counts={category: total(some) for category, some in counts.items()},
        stages=stages,
    )


def head_record(head: DraftHead) -> dict[str, Any]:
    """Return the description of a head that is stored with its measurements."""
    return {
        "algorithm": head.algorithm,
        "config": vars(head.config),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "training": dict(head.provenance.training) if head.provenance is not None else {},
    }


def _load_head(name: str, base: BaseModel) -> DraftHead | None:
    """Return the head of that name; None for a drafter that is not a single head."""
    if name in HEADS:
        return load_head(EMBEDDED_HEADS / name, base)
    if name == "auto" or name in TRAINING_FREE or kind_and_rest(name)[0] or len(merged_names(name)) > 1:
        return None
    return load_head(name, base)


class VerifierTrials:
    """Decodes the same requests under several verifiers, each beside plain decoding in the same rounds.

    Each verifier has its own engine, because an engine learns what pays under its verifier, reads the hidden states
    that it needs, and on a GPU replays graphs recorded with it. So two engines exist at a time. `drafter` makes a new
    drafter for each; `depth` is the most draft tokens of a path.
    """

    def __init__(
        self,
        base: BaseModel,
        tokenizer: Any,
        drafter: Callable[[], Drafter],
        requests: Sequence[Request],
        config: EngineConfig,
        rounds: int,
    ) -> None:
        self._base, self._tokenizer, self._drafter, self._requests = base, tokenizer, drafter, requests
        self._config, self._rounds = replace(config, max_queue=max(config.max_queue, len(requests))), rounds
        gc.collect()  # engines are cyclic: an unused one holds device memory until collected
        spec, nodes = drafter().spec, config.num_draft_tokens
        self.depth = min(spec.max_depth, spec.max_nodes if nodes == "auto" else nodes)
        self._plain = engine_decoder(Engine(base, PlainDecoding(), tokenizer, self._config))
        self._plain(requests[:_WARM_UP_PROMPTS])

    def run(self, settings: VerifierSettings) -> VerifierFigures:
        """Decode the requests under a verifier; the figures have answers, and no utility yet.

        Raises:
            LoadError: The verifier does not fit the target model or the drafter.
            RequestError: The verifier does not take the requests' settings.
        """
        gc.collect()
        verifier = make_verifier(settings)
        decode = engine_decoder(Engine(self._base, self._drafter(), self._tokenizer, self._config, verifier=verifier))
        decode(self._requests[:_WARM_UP_PROMPTS])
        *_, runs = in_turns({"verifier": decode, "plain": self._plain}, [self._requests], self._rounds)
        rates = {name: [per_second(run.num_tokens, run.seconds) for (run,) in some] for name, some in runs.items()}
        first = runs["verifier"][0][0]
        return VerifierFigures(
            settings,
            first.outputs,
            [one.text for one in first.generations],
            sum(len(one.lenient) for one in first.generations),
            total(first.counts),
            rates["verifier"],
            rates["plain"],
        )
