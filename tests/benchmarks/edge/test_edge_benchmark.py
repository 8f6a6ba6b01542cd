"""The benchmark of devices: what it counts as served, and that it writes what it says, with servers in this process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.edge import __main__ as benchmark
from benchmarks.endpoint.servers import Server
from drafter import EngineConfig, SpeculativeLM
from pipeline.serving.config import EdgeConfig
from pipeline.serving.replica import Answers
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE


@pytest.mark.parametrize(("slow", "serves"), [(0, True), (1, True), (2, False)])
def test_a_level_is_served_if_all_but_a_tenth_are(slow: int, serves: bool) -> None:
    level = benchmark.Level("", 16, [4.9] * slow + [5.0] * (16 - slow), 0.0, 0)
    assert level.serves(5.0) == serves
    assert benchmark._served([level], "", 5.0) == 16 * serves


@pytest.mark.slow
def test_its_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def local(args: argparse.Namespace, name: str, drafter: str) -> Iterator[Server]:
        config, edge = EngineConfig(max_num_seqs=2, num_draft_tokens=4, max_queue=64), EdgeConfig(sessions=64)
        with (
            SpeculativeLM.from_pretrained(name, drafter, config=config, brought=16) as lm,
            served({"model": Answers(lm, "replica", PATIENCE, edge)}, edge=edge) as address,
        ):
            yield Server(address, "model", 0)

    monkeypatch.setattr(benchmark, "_server", local)
    few = ["--levels", "1", "2", "--tokens", "8", "--draft-ms", "0", "--round-trip-ms", "0", "--rate", "1e-9"]
    benchmark.main(["--sessions", "12", "--faults", "2", "--server-drafter", "ngram", "--output", str(tmp_path), *few])
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert list(summary) == [
        *("sessions", "sessions_differing", "cuts", "repeats", "losses"),
        *("bytes_per_token", "devices_served", "devices_served_plainly"),
    ]
    assert (summary["sessions"], summary["sessions_differing"]) == (15, 0)
    assert (summary["devices_served"], summary["devices_served_plainly"]) == (2, 2)
    assert 10 < summary["bytes_per_token"] < 200
    record = json.loads((tmp_path / "edge.json").read_text(encoding="utf-8"))
    assert {level["arm"] for level in record["levels"]} == {"plain", "the server drafts", "devices draft"}
    assert record["environment"]["command"].startswith("python -m benchmarks.edge --sessions 12")
