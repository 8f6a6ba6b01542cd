"""Steps of the `pad` job around its generation jobs, and its results: ROC, and utility against speed."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from matplotlib.figure import Figure

from drafter.acceptance.settings import VerifierSettings
from drafter.errors import LoadError, RequestError
from drafter.evaluation.measurement import VerifierTrials
from drafter.evaluation.verifiers import VerifierFigures, utility_plot, utility_table, verifier_grid
from drafter.methods.pad.method import BaseOfClassifier, save_classifier
from drafter.methods.pad.training import Roc, roc, train_classifier
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.ray_cluster import ActorResources, connect, share_out
from pipeline.engines.models import model_name
from pipeline.errors import InputError
from pipeline.evaluation.measuring import ScoredVerifiers, load_models, measured, measuring
from pipeline.generate.checks import with_model_defaults
from pipeline.io.files import locate
from pipeline.output.folder import versions
from pipeline.pad.config import PivotsConfig, PivotsFolder
from pipeline.pad.labels import (
    continuations_by_side,
    features_of,
    is_held_out,
    labelled,
    labels_of,
    read_table,
    refuse_own_settings,
    rejected_tokens,
    requests_of,
    write_table,
)
from pipeline.report.audit import RepeatedRow, rows_to_repeat
from pipeline.report.outputs import open_output, read_run_of, rows_of
from pipeline.report.scorers import Scorer


def roc_plot(found: Roc) -> Figure:
    """Plot the share of pivots that are found over that of harmless tokens taken for pivots."""
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    panel = figure.subplots()
    wrong, right = [one.false_positives for one in found.points], [one.true_positives for one in found.points]
    panel.plot(wrong, right, color="#0072B2", label=f"area {found.area:.3f}")
    panel.plot([0, 1], [0, 1], color="grey", linestyle=":", label="by chance")
    panel.set(
        xlabel="share of harmless tokens rejected", ylabel="share of pivots rejected", xlim=(0, 1), ylim=(0, 1.02)
    )
    panel.legend(loc="lower right")
    return figure


class PivotSteps:
    """The job's steps between and after its generation jobs."""

    def __init__(self, config: PivotsConfig, folder: PivotsFolder, scorer: Scorer) -> None:
        self._config, self._folder, self._scorer = config, folder, scorer
        self._model = model_name(config.model)

    def find_tokens(self) -> None:
        """Decode the answers once more, and keep rejected tokens; raise `InputError` if there is nothing to label."""
        config, rows = self._config, self._answered()
        refuse_own_settings(rows, with_model_defaults(config.answers(config.output), drawn=False).sampling)
        resources = self._resources()
        found: list[pa.Table] = []
        base: BaseOfClassifier | None = None
        if len({is_held_out(row.request.request_id, config.held_out) for row in rows}) < 2:
            share = f"{config.held_out:.0%}"
            raise InputError(f"{len(rows)} prompts are too few to hold {share} of them out: give more")
        asked = (self._model, config.drafter, asdict(config.loading), asdict(config.engine), rows)
        limits = (config.tokens_per_prompt, resources.threads)
        for item in measured(resources, rejected_tokens, *asked, *limits, mistakes=(LoadError, RequestError)):
            if isinstance(item, BaseOfClassifier):
                base = item
            else:
                done, table = item
                found.append(table)
                print(f"{done} of {len(rows)} answers searched for rejected tokens", file=sys.stderr, flush=True)
        if base is None or not sum(table.num_rows for table in found):
            raise InputError(
                f"no draft token of {config.drafter} was rejected in {len(rows)} answers: give more prompts, longer "
                "answers or another drafter"
            )
        write_table(pa.concat_tables(found), self._folder.tokens, base)

    def write_requests(self) -> None:
        """Write the texts to continue."""
        tokens, _ = read_table(self._folder.tokens)
        batches = tokens.drop_columns(["hidden"]).to_batches(max_chunksize=1024)
        rows = (row for batch in batches for row in batch.to_pylist())
        lines = requests_of(rows, self._config.rollouts, self._config.temperature)
        with locate(str(self._folder.requests)).open_whole() as stream:
            for line in lines:
                stream.write(line.encode())

    def label(self) -> tuple[pa.Table, BaseOfClassifier]:
        """Score the continuations, write the labels, and return them with the facts of the target model.

        Raises `InputError` if an answer cannot be scored or is worth less than 0, or labels are too few or alike.
        """
        tokens, base = read_table(self._folder.tokens)
        rows = rows_of(open_output(str(self._folder.continuations)), ("custom_id", "token_ids"))
        tokenizer = load_tokenizer(self._model, trust_remote_code=self._config.loading.trust_remote_code)

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        sides, stop = continuations_by_side(rows), self._config.sampling.stop
        asked = tokens.drop_columns(["prefix", "left", "hidden"]).to_pylist()
        labels = list(labels_of(asked, sides, self._answers(), self._scorer, decode, stop))
        table = labelled(tokens, labels, self._config.held_out)
        write_table(table, self._folder.labels, base)
        kinds = set(table.filter(pa.compute.invert(table["held_out"]))["pivot"].to_pylist())
        if len(kinds) < 2:
            what = {frozenset({False}): "none is a pivot", frozenset({True}): "all are pivots"}
            raise InputError(
                f"{len(labels)} labelled tokens teach nothing, as of those that are not held out "
                f"{what.get(frozenset(kinds), 'there are none')}: give more prompts, or ones that the model answers "
                f"rightly more often; the labels are in {self._folder.labels}"
            )
        return table, base

    def learn(self, labels: pa.Table, base: BaseOfClassifier, command: str) -> tuple[str, list[Path]]:
        """Train and save the classifier, measure it on held-out prompts, and write the results.

        Returns the results as text, and the plots' paths. Raises `InputError` if the models cannot be loaded, and
        `JobError` if the measurement failed.
        """
        out = labels["held_out"]
        features, kinds = features_of(labels.filter(pa.compute.invert(out)))
        classifier = train_classifier(features, kinds)
        held_out, found = labels.filter(out), None
        if held_out.num_rows:
            others, truth = features_of(held_out)
            with torch.no_grad():
                found = roc(classifier.log_pivot(others).exp().tolist(), truth.tolist())
        pivots = int(pa.compute.sum(labels["pivot"]).as_py())
        counts = {"labels": labels.num_rows, "pivots": pivots, "held_out": held_out.num_rows}
        training = {
            **counts,
            "area_under_roc": None if found is None else found.area,
            "config": asdict(self._config),
            "command": command,
            "versions": versions(),
        }
        save_classifier(classifier, base, training, self._folder.verifier)
        return self._write_results(counts, found, *self._curve(command))

    def _write_results(
        self, counts: dict[str, int], found: Roc | None, where: dict[str, Any], curve: list[VerifierFigures]
    ) -> tuple[str, list[Path]]:
        results = {
            **counts,
            "roc": None if found is None else asdict(found),
            "curve": [one.as_dict() for one in curve],
            "environment": where,
        }
        plots = {"utility_by_beta.png": utility_plot(curve)} | ({} if found is None else {"roc.png": roc_plot(found)})
        for name, figure in plots.items():
            figure.savefig(self._folder.path / name, dpi=150)
        locate(str(self._folder.results)).write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        area = "not known: they are all alike" if found is None else f"{found.area:.3f}"
        told = f"labels:   {counts['labels']:,} rejected tokens, {counts['pivots']:,} of them pivots\n"
        told += f"ROC:      area {area}, on {counts['held_out']:,} tokens of held-out prompts\n"
        return f"{told}\n{utility_table(curve)}\n", [self._folder.path / name for name in plots]

    def _curve(self, command: str) -> tuple[dict[str, Any], list[VerifierFigures]]:
        config, resources = self._config, self._resources()
        held_out = [row for row in self._answered() if is_held_out(row.request.request_id, config.held_out)]
        requests, answers = [row.request for row in held_out], self._answers()
        rows = [answers[request.request_id] for request in requests]
        pad = VerifierSettings("pad", {"classifier": str(self._folder.verifier)})
        load = partial(load_models, self._model, asdict(config.loading), resources.threads, os.getcwd())
        with measuring(resources, VerifierTrials, load, mistakes=(LoadError, RequestError)) as ask:
            where: dict[str, Any] = ask("load", command)
            ask("begin", config.drafter, config.engine, requests, config.rounds)
            scored = ScoredVerifiers(ask, rows, self._scorer)
            return where, [scored.exact, *map(scored.measure, verifier_grid(pad))]

    def _answers(self) -> dict[str, dict[str, Any]]:
        return {row["request_id"]: row for row in rows_of(open_output(str(self._folder.answers)), None)}

    def _answered(self) -> list[RepeatedRow]:
        output = open_output(str(self._folder.answers))
        return list(rows_to_repeat(output, read_run_of(output), 1.0))

    def _resources(self) -> ActorResources:
        return share_out(self._config.resources, connect(), what="searches for rejected tokens")
