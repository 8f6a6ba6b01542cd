"""Measures verifiers against exact decoding: an actor decodes, the driver scores and chooses the next settings."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from drafter.acceptance.registry import make_verifier
from drafter.acceptance.settings import VerifierSettings
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.config import EngineConfig
from drafter.errors import LoadError, RequestError, one_line
from drafter.evaluation.environment import comparable, environment
from drafter.evaluation.plan import Nodes
from drafter.evaluation.questions import Question, encode
from drafter.evaluation.results import write_json
from drafter.evaluation.verifiers import (
    EXACT,
    VerifierFigures,
    VerifierRun,
    VerifierTrials,
    fastest_that_keeps,
    in_order,
    next_setting,
    title_of,
    utility_plot,
    utility_table,
    verifier_grid,
)
from drafter.requests import Request, SamplingParams
from drafter.target.loading import load_base
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.engines.models import (
    classifier_fingerprints,
    file_fingerprint,
    head_fingerprints,
    model_fingerprint,
    model_name,
)
from pipeline.errors import InputError
from pipeline.evaluation.config import EvaluateConfig
from pipeline.evaluation.measuring import Ask, measuring
from pipeline.report.against.scorers import Scorer, make_scorer, scorer_file, scores_of


class VerifierMeasurement:
    """Actor that holds the target model. Call `load`, then `begin`, then `run` for each verifier."""

    def __init__(self, model: str, loading: Mapping[str, Any], threads: int) -> None:
        self._model, self._loading, self._threads = model, loading, threads
        self._trials: VerifierTrials | None = None

    def load(self, command: str) -> dict[str, Any]:
        """Load the target model, and return the record of the environment.

        Raises:
            LoadError: It cannot be loaded.
        """
        torch.set_num_threads(self._threads)
        self._base = load_base(self._model, **self._loading)
        trusted = bool(self._loading["trust_remote_code"])
        self._tokenizer = load_tokenizer(self._model, trust_remote_code=trusted)
        return environment(self._base, command)

    def begin(self, drafter: str, engine: Mapping[str, Any], requests: Sequence[Request], rounds: int) -> int:
        """Prepare to decode `requests`, each `rounds` times, and return the most draft tokens on a path.

        Raises:
            LoadError: The drafter cannot be loaded.
        """
        self._trials = None  # frees the previous engine's memory
        base, config = self._base, EngineConfig(**engine)
        nodes = useful_nodes(base.device) if config.num_draft_tokens == "auto" else config.num_draft_tokens
        self._trials = VerifierTrials(
            base, self._tokenizer, lambda: load_drafter(drafter, base, nodes), requests, config, rounds
        )
        return self._trials.depth

    def run(self, settings: VerifierSettings) -> VerifierRun:
        """Decode the requests under a verifier.

        Raises:
            LoadError: The verifier does not fit the target model or the drafter.
            RequestError: It does not take the requests' settings.
        """
        assert self._trials is not None
        return self._trials.run(settings)


class ScoredVerifiers:
    """Measures verifiers on the requests of a `VerifierMeasurement`. Exact decoding is measured at once.

    Args:
        rows: The requests' rows, in their order; see `scores_of`.

    Raises:
        InputError: The scorer cannot score an answer.
        JobError: The measurement failed.
    """

    def __init__(self, ask: Ask, rows: Sequence[Mapping[str, Any]], scorer: Scorer) -> None:
        self._ask, self._rows, self._scorer = ask, rows, scorer
        run, self._exact = self._run(EXACT)
        self.exact = VerifierFigures.of(run, self._exact, self._exact)

    def measure(self, settings: VerifierSettings) -> VerifierFigures:
        """Return the figures of a verifier.

        Raises:
            InputError: The verifier does not fit, or the scorer cannot score an answer.
            JobError: The measurement failed.
        """
        run, scores = self._run(settings)
        return VerifierFigures.of(run, self._exact, scores)

    def _run(self, settings: VerifierSettings) -> tuple[VerifierRun, list[float]]:
        run: VerifierRun = self._ask("run", settings)
        return run, scores_of(self._rows, run.token_ids, run.texts, self._scorer)


# Side-by-side evaluation on scored questions: β, γ and utility relative to exact decoding.

RESULTS_FILE = "verifiers.json"


@dataclass(frozen=True)
class Block:
    """A combination of settings under which all verifiers are compared."""

    questions: str
    drafter: str
    nodes: Nodes
    batch: int
    temperature: float

    @property
    def title(self) -> str:
        return (
            f"{self.questions}, {self.drafter}, {self.nodes} draft nodes, batch {self.batch}, "
            f"temperature {self.temperature:g}"
        )


def evaluate_verifiers(
    config: EvaluateConfig,
    questions: Mapping[str, Sequence[Question]],
    command: str,
    folder: Path,
    resources: ActorResources,
) -> None:
    """Measure all blocks, one after another, except those that an earlier submission has measured.

    Raises:
        InputError: A question has several turns, models or verifiers cannot be used, or the output is another's.
        JobError: A measurement failed.
    """
    assert config.scorer is not None
    scorer, plan = make_scorer(config.scorer, config.target), config.plan()
    for name, some in questions.items():
        if more := [question.name for question in some if len(question.turns) > 1]:
            raise InputError(
                f"questions {name}: {more[0]} has several turns, and a scorer scores one answer: leave it out"
            )
    results = _open_results(folder, _identity(config, questions))
    made = [one["block"] for one in results["blocks"]]
    settings = product(questions, plan.drafters, plan.num_draft_tokens, plan.batches, plan.temperatures)
    blocks = [Block(*one) for one in settings]
    for block in (one for one in blocks if asdict(one) in made):
        print(f"{block.title}: measured before", file=sys.stderr, flush=True)
    left = [one for one in blocks if asdict(one) not in made]
    if not left:
        return
    loaded = (model_name(config.model), asdict(config.loading), resources.threads)
    with measuring(resources, VerifierMeasurement, *loaded, mistakes=(LoadError, RequestError)) as ask:
        results["environment"] = _same_environment(folder, results["environment"], ask("load", command))
        for block in left:
            _evaluate_block(block, config, questions[block.questions], scorer, ask, results, folder)


def _evaluate_block(
    block: Block,
    config: EvaluateConfig,
    questions: Sequence[Question],
    scorer: Scorer,
    ask: Ask,
    results: dict[str, Any],
    folder: Path,
) -> None:
    verifiers, left_out = _usable(config, block.temperature)
    print(block.title, file=sys.stderr, flush=True)
    for reason in left_out:
        print(f"left out at temperature {block.temperature:g}: {reason}", file=sys.stderr, flush=True)
    found = _measured(config, block, questions, verifiers, scorer, ask)
    kept = [] if config.keep is None else fastest_that_keeps(found, config.keep)
    measured_block = {
        "block": asdict(block),
        "left_out": left_out,
        "verifiers": [one.as_dict() for one in found],
        "kept": [one.as_dict() for one in kept],
    }
    results["blocks"].append(measured_block)
    # The plot comes first: a block in the results is not measured again, and a kill in between would lose its plot.
    plot = folder / f"utility_by_beta_{len(results['blocks'])}.png"
    utility_plot(found, kept).savefig(plot, dpi=150)
    write_json(folder / RESULTS_FILE, results)
    print(f"## {block.title}\n\n{utility_table(found)}\n")
    print("\n".join([*_kept_lines(config, found, kept), f"written:  {folder / RESULTS_FILE}, {plot}"]), flush=True)


def _identity(config: EvaluateConfig, questions: Mapping[str, Sequence[Question]]) -> dict[str, Any]:
    assert config.scorer is not None
    file, verifiers = scorer_file(config.scorer), config.lenient_verifiers()
    heads: dict[str, str] = {}
    for name in config.plan().drafters:
        heads |= head_fingerprints(config.model, name)
    for one in verifiers:
        heads |= classifier_fingerprints(one)
    return {
        "model": model_fingerprint(model_name(config.model)),
        "heads": heads,
        "dtype": config.loading.dtype,
        "questions": {name: _digest(some) for name, some in questions.items()},
        "verifiers": [asdict(one) for one in verifiers],
        "scorer": config.scorer if file is None else file_fingerprint(file),
        "target": config.target,
        "keep": config.keep,
        "rounds": config.rounds,
        "max_new_tokens": config.max_new_tokens,
        "compile": config.compile,
    }


def _digest(questions: Sequence[Question]) -> str:
    return hashlib.sha256(json.dumps([dict(one.columns) for one in questions]).encode()).hexdigest()[:16]


def _open_results(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    file = folder / RESULTS_FILE
    if not file.exists():
        return {"identity": identity, "environment": {}, "blocks": []}
    try:
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        same = results["identity"] == json.loads(json.dumps(identity))
        comparable(results["environment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"output {folder} has a damaged {RESULTS_FILE} ({one_line(error)}): choose another") from error
    if not same:
        raise InputError(f"output {folder} holds another evaluation of verifiers (settings or models): choose another")
    return results


def _same_environment(folder: Path, earlier: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Return the environment of the file's blocks, or `here` before the first; refuse to mix different ones."""
    if not earlier:
        return here
    before, now = comparable(earlier), comparable(here)
    if other := [name for name in now if now[name] != before[name]]:
        raise InputError(
            f"output {folder} holds an evaluation of verifiers on another machine or by other code "
            f"({', '.join(other)}), and speeds of both cannot stand side by side: choose another"
        )
    return earlier


def _usable(config: EvaluateConfig, temperature: float) -> tuple[list[VerifierSettings], list[str]]:
    found: list[VerifierSettings] = []
    left_out: list[str] = []
    for one in config.lenient_verifiers():
        try:
            for settings in verifier_grid(one):
                make_verifier(settings).refuse(SamplingParams(temperature=temperature))
        except RequestError as error:
            left_out.append(str(error))
        except LoadError as error:
            raise InputError(str(error)) from error
        else:
            found.append(one)
    return found, left_out


def _measured(
    config: EvaluateConfig,
    block: Block,
    questions: Sequence[Question],
    verifiers: Sequence[VerifierSettings],
    scorer: Scorer,
    ask: Ask,
) -> list[VerifierFigures]:
    try:
        tokenizer = load_tokenizer(model_name(config.model), trust_remote_code=config.loading.trust_remote_code)
        requests = [
            Request(
                encode(tokenizer, [{"role": "user", "content": question.turns[0]}]),
                SamplingParams(config.max_new_tokens, block.temperature, seed=number),
                question.name,
            )
            for number, question in enumerate(questions)
        ]
    except (LoadError, RequestError) as error:
        raise InputError(str(error)) from error
    longest = max(len(request.prompt_ids) for request in requests) + config.max_new_tokens
    engine = {
        "max_num_seqs": block.batch,
        "max_model_len": longest,
        "num_draft_tokens": block.nodes,
        "compile": config.compile,
    }
    depth: int = ask("begin", block.drafter, engine, requests, config.rounds)
    rows = [{**question.columns, "request_id": question.name} for question in questions]
    scored = ScoredVerifiers(ask, rows, scorer)
    found = [scored.exact]
    for verifier in verifiers:
        found += _tried(verifier, scored, config.keep, depth)
    return in_order(found)


def _tried(
    verifier: VerifierSettings, scored: ScoredVerifiers, keep: float | None, depth: int
) -> list[VerifierFigures]:
    """Return the figures of a verifier's grid and of the search after it, if some utility is to be kept."""
    found: list[VerifierFigures] = []
    for settings in _to_try(verifier, found, keep, depth):
        found.append(scored.measure(settings))
        kept = "" if (share := found[-1].kept) is None else f", keeps {share:.1%}"
        print(f"{title_of(settings)}: β {found[-1].beta:.2f}{kept}", file=sys.stderr, flush=True)
    return found


def _to_try(
    verifier: VerifierSettings, found: Sequence[VerifierFigures], keep: float | None, depth: int
) -> Iterator[VerifierSettings]:
    """Yield settings one by one; the caller appends the figures of each to `found` before asking for the next."""
    yield from verifier_grid(verifier)
    while keep is not None and (settings := next_setting(verifier, found, keep, depth)) is not None:
        yield settings


def _kept_lines(config: EvaluateConfig, found: Sequence[VerifierFigures], kept: Sequence[VerifierFigures]) -> list[str]:
    if config.keep is None:
        return []
    lines = []
    for name in dict.fromkeys(one.verifier.name for one in found[1:]):
        best = next((one for one in kept if one.verifier.name == name), None)
        if best is None:
            lines.append(f"keeps {config.keep:.1%}: no setting of {name}")
            continue
        flags = " ".join(f"--verifier.{setting} {value}" for setting, value in best.verifier.given.items())
        betas = f"β {best.beta:.2f}, exact {found[0].beta:.2f}"
        lines.append(f"keeps {config.keep:.1%}: --verifier {name} {flags} ({betas})")
    return [*lines, ""]
