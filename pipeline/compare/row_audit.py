"""The audit: some rows of an exact output are generated again, plainly, and must have the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drafter.errors import LoadError
from pipeline.cluster.ray_cluster import connect
from pipeline.cluster.resources_config import ResourcesConfig
from pipeline.cluster.shares import share_out
from pipeline.compare.plain_rows import AuditDifference, Choice, plain_differences
from pipeline.compare.repeated_rows import rows_to_repeat
from pipeline.engines.named_models import model_name
from pipeline.errors import InputError
from pipeline.evaluation.measuring_task import measured
from pipeline.report.output_files import open_output, read_run_of


@dataclass(frozen=True)
class Audit:
    """What came of an audit.

    Args:
        rows: How many rows were generated again.
        differences: One for each of them that differs.
    """

    rows: int
    differences: list[AuditDifference]

    def lines(self, uri: str) -> Iterator[str]:
        """Say it in lines.

        Args:
            uri: The output.
        """
        same = self.rows - len(self.differences)
        yield f"{uri}: {self.rows:,} rows generated again by plain decoding, {same:,} of them with the same tokens"
        for one in self.differences:
            where = f"row {one.name}, token {one.place}"
            yield f"  {where}: the output has {_said(one.said)}, plain decoding {_said(one.plain)}"


def audit(uri: str, share: float) -> Audit:
    """Generate a share of an output's rows again, on the cluster's GPU if it has one.

    Args:
        uri: Folder or URI of the output.
        share: Of its finished rows.

    Raises:
        InputError: The output is not exact, or cannot be read, or its base cannot be loaded.
        JobError: The task failed.
    """
    output = open_output(uri)
    run = read_run_of(output)
    if not run.get("lossless", True):
        raise InputError(
            f"output {uri} was made by the verifier {run['verifier']}, which is not exact: leave out --sample"
        )
    rows, config = list(rows_to_repeat(output, run, share)), run["config"]
    gpus = config["resources"]["gpus_per_actor"]
    resources = share_out(ResourcesConfig(gpus_per_actor=gpus), connect(), what="audit", settings="the job's {}")
    differences = measured(
        resources,
        plain_differences,
        model_name(config["model"]),
        config["loading"],
        config["engine"],
        run.get("base_fingerprint"),
        rows,
        resources.threads,
        mistakes=(LoadError,),
    )
    return Audit(len(rows), list(differences))


def _said(choice: Choice) -> str:
    if choice.token is None:
        return "ended"
    return f"{choice.token} {choice.text!r} (logit {choice.logit:.6f})"
