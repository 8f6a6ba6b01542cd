"""Steps of the `pad` job around its generation jobs, and its results: ROC, and utility against speed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from matplotlib.figure import Figure

from drafter.acceptance.settings import VerifierSettings
from drafter.errors import LoadError, RequestError
from drafter.evaluation.verifiers import VerifierFigures, utility_plot, utility_table, verifier_grid
from drafter.methods.pad.classifier import BaseOfClassifier, save_classifier
from drafter.methods.pad.training import Roc, roc, train_classifier
from drafter.text.tokenizers import load_tokenizer
from pipeline.cluster.ray_cluster import ActorResources, connect, share_out
from pipeline.engines.models import model_name
from pipeline.errors import InputError
from pipeline.evaluation.measuring import measured, measuring
from pipeline.evaluation.verifiers import ScoredVerifiers, VerifierMeasurement
from pipeline.generate.job import with_model_defaults
from pipeline.io.files import locate
from pipeline.output.run_file import versions
from pipeline.pad.config import PivotsConfig
from pipeline.pad.folder import PivotsFolder
from pipeline.pad.rejected_tokens import (
    BaseFacts,
    features_of,
    is_held_out,
    labelled,
    read_table,
    rejected_tokens,
    write_table,
)
from pipeline.pad.rollouts import continuations_by_side, labels_of, refuse_own_settings, requests_of
from pipeline.report.against.audit import RepeatedRow, rows_to_repeat
from pipeline.report.against.pairs import rows_of
from pipeline.report.against.scorers import Scorer
from pipeline.report.output_files import open_output, read_run_of


@dataclass(frozen=True)
class PivotResults:
    """Results of the job.

    Args:
        held_out: Number of labelled tokens that the classifier has not learned from.
        roc: On held-out tokens; None where they are all alike.
        curve: Exact decoding, and `pad` at rising σ, on the held-out prompts.
        where: Hardware, versions and command line.
    """

    labels: int
    pivots: int
    held_out: int
    roc: Roc | None
    curve: Sequence[VerifierFigures]
    where: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "labels": self.labels,
            "pivots": self.pivots,
            "held_out": self.held_out,
            "roc": None if self.roc is None else asdict(self.roc),
            "curve": [one.as_dict() for one in self.curve],
            "environment": self.where,
        }

    def lines(self) -> list[str]:
        """Describe the results in lines."""
        area = "not known: they are all alike" if self.roc is None else f"{self.roc.area:.3f}"
        return [
            f"labels:   {self.labels:,} rejected tokens, {self.pivots:,} of them pivots",
            f"ROC:      area {area}, on {self.held_out:,} tokens of held-out prompts",
            "",
            utility_table(self.curve),
            "",
        ]

    def write_plots(self, folder: Path) -> list[Path]:
        """Draw the ROC and the curve as PNG files, and return their paths."""
        figures = {"utility_by_beta.png": utility_plot(self.curve)}
        if self.roc is not None:
            figures["roc.png"] = roc_plot(self.roc)
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=150)
        return [folder / name for name in figures]


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
        """Decode the answers once more, and keep rejected tokens.

        Raises:
            InputError: The models cannot be loaded, a row has sampling settings of its own, no prompt is held out, or
                nothing was rejected.
            JobError: The task failed.
        """
        config, rows = self._config, self._answered()
        refuse_own_settings(rows, with_model_defaults(config.answers(config.output), drawn=False).sampling)
        resources = self._resources()
        found: list[pa.Table] = []
        base: BaseFacts | None = None
        if len({is_held_out(row.request.request_id, config.held_out) for row in rows}) < 2:
            share = f"{config.held_out:.0%}"
            raise InputError(f"{len(rows)} prompts are too few to hold {share} of them out: give more")
        asked = (self._model, config.drafter, asdict(config.loading), asdict(config.engine), rows)
        limits = (config.tokens_per_prompt, resources.threads)
        for item in measured(resources, rejected_tokens, *asked, *limits, mistakes=(LoadError, RequestError)):
            if isinstance(item, BaseFacts):
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

    def label(self) -> tuple[pa.Table, BaseFacts]:
        """Score the continuations, write the labels, and return them with the facts of the target model.

        Raises:
            InputError: The scorer cannot score an answer or gives a negative score, there are too few labels, or all
                are alike.
        """
        tokens, base = read_table(self._folder.tokens)
        answers = {row["request_id"]: row for row in rows_of(open_output(str(self._folder.answers)), None)}
        rows = rows_of(open_output(str(self._folder.continuations)), ("custom_id", "token_ids"))
        tokenizer = load_tokenizer(self._model, trust_remote_code=self._config.loading.trust_remote_code)

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        sides, stop = continuations_by_side(rows), self._config.sampling.stop
        asked = tokens.drop_columns(["prefix", "left", "hidden"]).to_pylist()
        labels = list(labels_of(asked, sides, answers, self._scorer, decode, stop))
        table = labelled(tokens, labels, self._config.held_out)
        write_table(table, self._folder.labels, base)
        kinds = {label.pivot for label, out in zip(labels, table["held_out"].to_pylist(), strict=True) if not out}
        if len(kinds) < 2:
            what = {frozenset({False}): "none is a pivot", frozenset({True}): "all are pivots"}
            raise InputError(
                f"{len(labels)} labelled tokens teach nothing, as of those that are not held out "
                f"{what.get(frozenset(kinds), 'there are none')}: give more prompts, or ones that the model answers "
                f"rightly more often; the labels are in {self._folder.labels}"
            )
        return table, base

    def learn(self, labels: pa.Table, base: BaseFacts, command: str) -> PivotResults:
        """Train and save the classifier, and measure it on held-out prompts; `labels` come from `labelled`.

        Raises:
            InputError: The models cannot be loaded.
            JobError: The measurement failed.
        """
        out = labels["held_out"]
        features, kinds = features_of(labels.filter(pa.compute.invert(out)))
        classifier = train_classifier(features, kinds, base.layer)
        held_out, found = labels.filter(out), None
        if held_out.num_rows:
            others, truth = features_of(held_out)
            with torch.no_grad():
                found = roc(classifier.log_pivot(others).exp().tolist(), truth.tolist())
        training: dict[str, Any] = {
            "labels": labels.num_rows,
            "pivots": int(pa.compute.sum(labels["pivot"]).as_py()),
            "held_out": held_out.num_rows,
            "area_under_roc": None if found is None else found.area,
            "config": asdict(self._config),
            "command": command,
            "versions": versions(),
        }
        save_classifier(classifier, BaseOfClassifier(base.name, base.fingerprint), training, self._folder.verifier)
        where, curve = self._curve(command)
        return PivotResults(labels.num_rows, training["pivots"], held_out.num_rows, found, curve, where)

    def _curve(self, command: str) -> tuple[dict[str, Any], list[VerifierFigures]]:
        """Decode held-out prompts exactly and under `pad`; return the environment and the figures."""
        config, resources = self._config, self._resources()
        held_out = [row for row in self._answered() if is_held_out(row.request.request_id, config.held_out)]
        answers = {row["request_id"]: row for row in rows_of(open_output(str(self._folder.answers)), None)}
        requests = [row.request for row in held_out]
        rows = [answers[request.request_id] for request in requests]
        pad = VerifierSettings("pad", classifier=str(self._folder.verifier))
        loaded = (self._model, asdict(config.loading), resources.threads)
        with measuring(resources, VerifierMeasurement, *loaded, mistakes=(LoadError, RequestError)) as ask:
            where: dict[str, Any] = ask("load", command)
            ask("begin", config.drafter, asdict(config.engine), requests, config.rounds)
            scored = ScoredVerifiers(ask, rows, self._scorer)
            return where, [scored.exact, *map(scored.measure, verifier_grid(pad))]

    def _answered(self) -> list[RepeatedRow]:
        output = open_output(str(self._folder.answers))
        return list(rows_to_repeat(output, read_run_of(output), 1.0))

    def _resources(self) -> ActorResources:
        return share_out(self._config.resources, connect(), what="searches for rejected tokens")
