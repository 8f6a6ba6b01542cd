"""The dashboard asks for what a real Ray exports, and the figures are the engine's own."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import promql_parser
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from drafter.engine.config import EngineConfig
from drafter.requests import SamplingParams
from pipeline.engines.engine_actor import EngineActor
from pipeline.engines.ledger import Ledger
from pipeline.engines.models import EngineSpec
from pipeline.engines.shared_texts import OtherTexts
from pipeline.io.files import locate
from pipeline.output.columns import RunTraits
from pipeline.output.folder import OutputFolder
from pipeline.output.part_files import commit_part
from pipeline.progress.board import LearningReport, Progress, StatusBoard
from pipeline.progress.prometheus import job_metrics, learner_metrics
from pipeline.settings import LimitsConfig
from tests.support.parts import request_part
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, wait_until

DASHBOARD = json.loads((ROOT / "deploy" / "dashboards" / "drafter.json").read_text())
RUN = '/data/out "quoted"'
LEARNER = LearningReport(
    "learning", version=7, beta=2.5, published_beta=2.25, steps=90, seconds=8.0, loss=1.5, dropped=3
)


@dataclass(frozen=True)
class Sample:
    """One exported value."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Exported:
    """What a Ray exported, and the rows it was about."""

    samples: list[Sample]
    rows: list[dict[str, Any]]

    def labels(self, name: str) -> set[str]:
        """Labels of a metric; none where it is not exported."""
        return {label for sample in self.samples if sample.name == name for label in sample.labels}

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples with these labels, and this test's run."""
        wanted = {**labels, "run": RUN}
        return sum(
            sample.value for sample in self.samples if sample.name == name and wanted.items() <= sample.labels.items()
        )


def scrape() -> list[Sample]:
    """What the metrics endpoint of the session's Ray says."""
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return [Sample(one.name, one.labels, one.value) for family in families for one in family.samples]


@pytest.fixture(scope="module")
def exported(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    """An engine of a real actor has generated ten rows and refused two."""
    spec = EngineSpec(None, "ctc+memory", {}, EngineConfig(max_num_seqs=4, num_draft_tokens=8), threads=1)
    traits = RunTraits(SamplingParams(), rows_have_settings=False)
    board, ledger = ray.remote(num_cpus=0)(StatusBoard).remote(), ray.remote(num_cpus=0)(Ledger).remote()
    output = OutputFolder(locate(str(tmp_path_factory.mktemp("out"))))
    output.create()
    actor = ray.remote(num_cpus=1)(EngineActor).remote(
        spec, LimitsConfig(), traits, ledger, board, RUN, partial(commit_part, output), OtherTexts(None, shared=False)
    )
    prompts: list[list[int] | None] = [list(range(20, 24 + n)) for n in range(10)]
    ray.get(actor.__call__.remote(request_part([*prompts, [], []], tokens=40)))
    job, learner = job_metrics(RUN), learner_metrics(RUN, LearningReport(steps=30))
    rows = (output.data / "p.parquet").read_parquet().to_pylist()

    def all_reported() -> Exported | None:
        """Processes report to the node's agent every few seconds: the actor's own, and this one."""
        job.show(Progress("generating", total=40, before=8, rows=12, errors=2, recent_row_rate=2.0, engines=1))
        learner.show(LEARNER)
        found = Exported(scrape(), rows)
        whole = found.total("ray_drafter_tokens_total") == 400 and found.total("ray_drafter_job_rows_done")
        return found if whole else None

    yield wait_until(all_reported, "metrics of both processes", pause=0.5)
    ray.kill(actor)


def test_exported_sums_are_those_of_the_rows(exported: Exported) -> None:
    def rows(name: str) -> int:
        return sum(row[name] for row in exported.rows)

    assert (
        exported.total("ray_drafter_tokens_total", model="embedded", drafter="ctc+memory")
        == rows("num_output_tokens")
        == 400
    )
    assert exported.total("ray_drafter_row_steps_total") == rows("num_decode_steps")
    assert exported.total("ray_drafter_draft_tokens_total") == rows("num_draft_tokens")
    assert exported.total("ray_drafter_accepted_tokens_total") == rows("num_accepted_draft_tokens") > 0
    assert exported.total("ray_drafter_rows_total", finish_reason="length") == 10
    assert exported.total("ray_drafter_errors_total", type="Refused") == 2
    assert exported.total("ray_drafter_row_seconds_count") == 10
    assert exported.total("ray_drafter_slots") == 4
    assert exported.total("ray_drafter_slots_active") == 0
    remembered = exported.total("ray_drafter_memory_tokens")
    assert rows("num_prompt_tokens") < remembered <= rows("num_prompt_tokens") + rows("num_output_tokens")
    assert exported.total("ray_drafter_memory_bytes") > 20_000_000
    # More steps than any row has, as only four rows fit; at least as many as the rows have when four share each.
    steps = exported.total("ray_drafter_steps_total")
    assert rows("num_decode_steps") / 4 <= steps <= rows("num_decode_steps")
    busy = exported.total("ray_drafter_busy_seconds_total")
    assert 0 < exported.total("ray_drafter_stage_seconds_total") <= busy * 1.001
    assert exported.total("ray_drafter_job_rows_done") == 20
    assert exported.total("ray_drafter_job_eta_seconds") == 10
    assert exported.total("ray_drafter_learner_version") == 7
    assert exported.total("ray_drafter_learner_active") == 1
    assert exported.total("ray_drafter_learner_steps_total") == 60  # 30 of 90 are those of another process
    assert exported.total("ray_drafter_learner_dropped_total") == 3


def selectors(query: str) -> list[tuple[Any, set[str]]]:
    """The metrics that a query selects, each with the labels that it is grouped by."""
    query = query.replace("$__rate_interval", "5m").replace("$run", ".*").replace("$model", ".*")
    found: list[tuple[Any, set[str]]] = []

    def visit(node: Any, grouped: set[str]) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node, grouped))
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append((node.vector_selector, grouped))
        elif isinstance(node, promql_parser.AggregateExpr):
            visit(node.expr, grouped | set(node.modifier.labels if node.modifier else ()))
        elif isinstance(node, promql_parser.BinaryExpr):
            visit(node.lhs, grouped)
            visit(node.rhs, grouped)
        elif isinstance(node, promql_parser.Call):
            for argument in node.args:
                visit(argument, grouped)
        else:
            assert isinstance(node, promql_parser.NumberLiteral), f"{type(node)} in {query}"

    visit(promql_parser.parse(query), set())
    return found


def queries() -> list[tuple[str, str, str]]:
    """Panel, query and legend of all panels."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]


@pytest.mark.parametrize(("title", "query", "legend"), queries())
def test_every_query_matches_exported_metrics(exported: Exported, title: str, query: str, legend: str) -> None:
    found = selectors(query)
    assert found
    for selector, grouped in found:
        labels = exported.labels(selector.name)
        assert labels, f"{title}: {selector.name} is not exported"
        assert {matcher.name for matcher in selector.matchers.matchers} | grouped <= labels, f"{title}: {selector.name}"
    assert set(re.findall(r"{{(\w+)}}", legend)) <= found[0][1]


def test_the_variables_are_exported_labels(exported: Exported) -> None:
    variables = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    assert {one["name"] for one in variables} == {"run", "model"}
    for one in variables:
        query = re.fullmatch(r"label_values\((\w+)(?:{.*})?, (\w+)\)", one["query"]["query"])
        assert query is not None
        assert query[2] in exported.labels(query[1])


def test_everything_exported_is_documented_and_the_other_way_round(exported: Exported) -> None:
    names = {re.sub(r"_(bucket|sum|count|created)$", "", one.name) for one in exported.samples}
    ours = {name for name in names if name.startswith("ray_drafter_")}
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"`(ray_drafter_\w+)`", text)) == ours
