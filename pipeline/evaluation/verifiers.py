"""Measures verifiers against exact decoding: an actor decodes, the driver scores and chooses the next settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from drafter.acceptance.registry import make_verifier
from drafter.acceptance.settings import VerifierSettings
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.config import EngineConfig
from drafter.errors import LoadError, RequestError, one_line
from drafter.evaluation.environment import environment
from drafter.evaluation.measurement import VerifierTrials
from drafter.evaluation.questions import Question, encode
from drafter.evaluation.results import Nodes, comparable, write_json
from drafter.evaluation.verifiers import (
    EXACT,
    VerifierFigures,
    fastest_that_keeps,
    in_order,
    next_setting,
    title_of,
    utility_plot,
    utility_table,
    verifier_grid,
)
from drafter.requests import Request, SamplingParams
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.shares import ActorResources
from pipeline.command_line import say
from pipeline.engines.models import (
    classifier_fingerprints,
    file_fingerprint,
    head_fingerprints,
    model_fingerprint,
    model_name,
)
from pipeline.errors import InputError
from pipeline.evaluation.config import EvaluateConfig
from pipeline.evaluation.measuring import Ask, as_job_errors, load_models, measuring
from pipeline.report.scorers import Scorer, make_scorer, scorer_file, scores_of

VERIFIERS_FILE = "verifiers.json"


class VerifierMeasurement:
    """Actor that holds the target model. Call `load`, then `begin`, then `run` for each verifier."""

    def __init__(self, model: str, loading: Mapping[str, Any], threads: int) -> None:
        self._asked = model, loading, threads
        self._trials: VerifierTrials | None = None

    def load(self, command: str) -> dict[str, Any]:
        """Load the target model, and return the record of the environment."""
        self._base, self._tokenizer = load_models(*self._asked)
        return environment(self._base, command)

    def begin(self, drafter: str, engine: Mapping[str, Any], requests: Sequence[Request], rounds: int) -> int:
        """Prepare to decode `requests`, each `rounds` times, and return the most draft tokens on a path."""
        self._trials = None  # frees the previous engine's memory
        base, config = self._base, EngineConfig(**engine)
        nodes = useful_nodes(base.device) if config.num_draft_tokens == "auto" else config.num_draft_tokens
        self._trials = VerifierTrials(
            base, self._tokenizer, lambda: load_drafter(drafter, base, nodes), requests, config, rounds
        )
        return self._trials.depth

    def run(self, settings: VerifierSettings) -> VerifierFigures:
        """Decode the requests under a verifier; see `VerifierTrials.run`."""
        assert self._trials is not None
        return self._trials.run(settings)


class ScoredVerifiers:
    """Measures verifiers on the requests of a `VerifierMeasurement`, whose rows are `rows`; exact decoding at once."""

    def __init__(self, ask: Ask, rows: Sequence[Mapping[str, Any]], scorer: Scorer) -> None:
        self._ask, self._rows, self._scorer = ask, rows, scorer
        self._exact: list[float] = []
        self.exact = self.measure(EXACT)

    def measure(self, settings: VerifierSettings) -> VerifierFigures:
        """Return the figures of a verifier.

        Raises `InputError` if it does not fit or an answer cannot be scored, and `JobError` if the measurement failed.
        """
        found: VerifierFigures = self._ask("run", settings)
        scores = scores_of(self._rows, found.token_ids, found.texts, self._scorer)
        if settings == EXACT:
            self._exact = scores
        return found.scored(self._exact, scores)


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

    Raises `InputError` if questions, models, verifiers or the output cannot be used, and `JobError` on failure.
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
        say(f"{block.title}: measured before")
    left = [one for one in blocks if asdict(one) not in made]
    if not left:
        return
    loaded = (model_name(config.model), asdict(config.loading), resources.threads)
    with measuring(resources, VerifierMeasurement, *loaded, mistakes=(LoadError, RequestError)) as ask:
        results["environment"] = _same_environment(folder, results["environment"], ask("load", command))
        for block in left:
            verifiers, left_out = _usable(config, block.temperature)
            say(
                "\n".join([block.title, *(f"left out at temperature {block.temperature:g}: {why}" for why in left_out)])
            )
            found = _measured(config, block, questions[block.questions], verifiers, scorer, ask)
            _add_block(config, block, left_out, found, results, folder)


def _identity(config: EvaluateConfig, questions: Mapping[str, Sequence[Question]]) -> dict[str, Any]:
    assert config.scorer is not None
    file, verifiers = scorer_file(config.scorer), config.lenient_verifiers()
    heads: dict[str, str] = {}
    for name in config.plan().drafters:
        heads |= head_fingerprints(config.model, name)
    for one in verifiers:
        heads |= classifier_fingerprints(one)
    texts = {name: json.dumps([dict(one.columns) for one in some]) for name, some in questions.items()}
    return {
        "model": model_fingerprint(model_name(config.model)),
        "heads": heads,
        "dtype": config.loading.dtype,
        "questions": {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()},
        "verifiers": [asdict(one) for one in verifiers],
        "scorer": config.scorer if file is None else file_fingerprint(file),
        "target": config.target,
        "keep": config.keep,
        "rounds": config.rounds,
        "max_new_tokens": config.max_new_tokens,
        "compile": config.compile,
    }


def _open_results(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    file = folder / VERIFIERS_FILE
    if not file.exists():
        return {"identity": identity, "environment": {}, "blocks": []}
    try:
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        same = results["identity"] == json.loads(json.dumps(identity))
        comparable(results["environment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"output {folder} has a damaged {VERIFIERS_FILE} ({one_line(error)}): choose another"
        ) from error
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
    """Return the verifiers that decode at a temperature, and why the others do not."""
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
    with as_job_errors((LoadError, RequestError)):
        tokenizer = load_tokenizer(model_name(config.model), trust_remote_code=config.loading.trust_remote_code)
        requests = [
            Request(
                encode(tokenizer, [{"role": "user", "content": question.turns[0]}]),
                SamplingParams(config.max_new_tokens, block.temperature, seed=number),
                question.name,
            )
            for number, question in enumerate(questions)
        ]
    engine = {
        "max_num_seqs": block.batch,
        "max_model_len": max(len(request.prompt_ids) for request in requests) + config.max_new_tokens,
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

    def measure(settings: VerifierSettings) -> None:
        found.append(scored.measure(settings))
        kept = "" if (share := found[-1].kept) is None else f", keeps {share:.1%}"
        say(f"{title_of(settings)}: β {found[-1].beta:.2f}{kept}")

    for settings in verifier_grid(verifier):
        measure(settings)
    while keep is not None and (following := next_setting(verifier, found, keep, depth)) is not None:
        measure(following)
    return found


def _add_block(
    config: EvaluateConfig,
    block: Block,
    left_out: Sequence[str],
    found: Sequence[VerifierFigures],
    results: dict[str, Any],
    folder: Path,
) -> None:
    """Plot, write and print the figures of a block."""
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
    write_json(folder / VERIFIERS_FILE, results)
    print(f"## {block.title}\n\n{utility_table(found)}\n")
    print("\n".join([*_kept_lines(config, found, kept), f"written:  {folder / VERIFIERS_FILE}, {plot}"]), flush=True)


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
