"""Verifiers measured side by side on questions whose answers are scored: β, γ and utility beside exact decoding."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from drafter.base.loading import load_tokenizer
from drafter.errors import LoadError, RequestError, one_line
from drafter.evaluation.environment import comparable
from drafter.evaluation.leniency.kept_utility import (
    VerifierFigures,
    fastest_that_keeps,
    in_order,
    title_of,
    utility_plot,
    utility_table,
)
from drafter.evaluation.leniency.setting_grid import verifier_grid
from drafter.evaluation.leniency.setting_search import next_setting
from drafter.evaluation.plan import Nodes
from drafter.evaluation.prepared_prompts import encode
from drafter.evaluation.questions import Question
from drafter.evaluation.results import write_json
from drafter.requests import Request, SamplingParams
from drafter.verifiers.registry import make_verifier
from drafter.verifiers.verifier_settings import VerifierSettings
from pipeline.cluster.shares import ActorResources
from pipeline.compare.scorers import Scorer, make_scorer, scorer_file
from pipeline.engines.model_files import file_fingerprint
from pipeline.engines.named_models import classifier_fingerprints, head_fingerprints, model_fingerprint, model_name
from pipeline.errors import InputError
from pipeline.evaluation.evaluate_config import EvaluateConfig
from pipeline.evaluation.measuring_actor import Ask, measuring
from pipeline.evaluation.scored_verifiers import ScoredVerifiers
from pipeline.evaluation.verifier_measurement import VerifierMeasurement

RESULTS_FILE = "verifiers.json"


@dataclass(frozen=True)
class Block:
    """Where verifiers stand side by side.

    Args:
        questions: Name of the set.
        drafter: Name of the drafter.
        nodes: Draft nodes of a step.
        batch: Requests decoded together.
        temperature: Sampling temperature.
    """

    questions: str
    drafter: str
    nodes: Nodes
    batch: int
    temperature: float

    @property
    def title(self) -> str:
        """It in words."""
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
    """Measure all blocks, one after another; those that an earlier submission has measured are left.

    Args:
        config: What to measure.
        questions: Sets of questions by name.
        command: The command line, for the record.
        folder: Output.
        resources: What a measurement takes.

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
    settings = product(questions, plan.drafters, plan.nodes, plan.batches, plan.temperatures)
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
    """Measure a block, add it to the results, and write and print these."""
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
    # The plot comes first: what is in the results is not measured again, and a kill in between would lose it.
    plot = folder / f"utility_by_beta_{len(results['blocks'])}.png"
    utility_plot(found, kept).savefig(plot, dpi=150)
    write_json(folder / RESULTS_FILE, results)
    print(f"## {block.title}\n\n{utility_table(found)}\n")
    print("\n".join([*_kept_lines(config, found, kept), f"written:  {folder / RESULTS_FILE}, {plot}"]), flush=True)


def _identity(config: EvaluateConfig, questions: Mapping[str, Sequence[Question]]) -> dict[str, Any]:
    """All that blocks of one file have in common."""
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
    """Tells sets of questions apart by all that they hold."""
    return hashlib.sha256(json.dumps([dict(one.columns) for one in questions]).encode()).hexdigest()[:16]


def _open_results(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Read what an earlier submission has measured, or begin anew."""
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
    """Return the record of a file's blocks, with which the next block's must agree; before the first it is empty."""
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
    """The verifiers that take a temperature; and why the others do not."""
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
    """The figures of exact decoding and of all settings that are tried, each verifier's from the strictest."""
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
    engine = {"slots": block.batch, "max_length": longest, "nodes": block.nodes, "compile": config.compile}
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
    """The figures of a verifier's grid, and of what the search tries after it if some utility is to be kept."""
    found: list[VerifierFigures] = []
    for settings in _to_try(verifier, found, keep, depth):
        found.append(scored.measure(settings))
        kept = "" if (share := found[-1].kept) is None else f", keeps {share:.1%}"
        print(f"{title_of(settings)}: β {found[-1].beta:.2f}{kept}", file=sys.stderr, flush=True)
    return found


def _to_try(
    verifier: VerifierSettings, found: Sequence[VerifierFigures], keep: float | None, depth: int
) -> Iterator[VerifierSettings]:
    """Yield settings one by one; `found` has the figures of those before."""
    yield from verifier_grid(verifier)
    while keep is not None and (settings := next_setting(verifier, found, keep, depth)) is not None:
        yield settings


def _kept_lines(config: EvaluateConfig, found: Sequence[VerifierFigures], kept: Sequence[VerifierFigures]) -> list[str]:
    """Say which settings keep enough."""
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
