"""The demonstration: what it reads of two finished runs, and what it says of them. CI runs it whole, by `make demo`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from drafter.statistics import DecodeCounts
from examples.demo import PLAIN, SPECULATIVE, answer_text, closing, in_colour, judgement, read_runs, screen
from pipeline.report.page import Example, MarkedText, Step
from tests.pipeline.report.outputs import write_output

SUMMARY: dict[str, Any] = {
    "rows": 2,
    "rows_differing": 0,
    "plain_tokens_per_second": 100.0,
    "tokens_per_second": 150.0,
    "speedup": 1.5,
    "acceptance_length": 2.5,
    "speculated_share": 1.0,
    "choice": [],
    "model": "no/such-model",
    "drafter": "auto",
    "draft_nodes": 7,
    "rows_at_a_time": 1,
    "load_average": 2.0,
    "hardware": {"cores": 2},
}
STEPS = (Step(1, 2, (MarkedText(" a b"),), " c"), Step(2, 0, (), " d"), Step(3, 1, (MarkedText(" e"),), "<end>"))
ANSWER = Example({"prompt": "Why?", "text": " a b c d e"}, "", STEPS)


def run(folder: Path, accepted: list[list[int]], tokens: list[list[int]], rate: float) -> None:
    rows = [
        {"id": str(number), "accepted": steps, "token_ids": ids, "marks": {"prompt": "Why?", "text": "30 "}}
        for number, (steps, ids) in enumerate(zip(accepted, tokens, strict=True))
    ]
    output = write_output(folder, [rows], [])
    config = {"model": "no/such-model", "drafter": "auto", "engine": {"max_num_seqs": 1, "num_draft_tokens": 7}}
    output.run_file.write_text(json.dumps({"config": config, "meaning": {}, "state": "finished"}))
    made = sum(map(len, tokens))
    took = {"rows": len(rows), "tokens": made, "seconds": made / rate, "gpu_seconds": 0.0, "cpu_seconds": 9.0}
    output.status_file.write_text(json.dumps({"submissions": [took | {"device": "CPU"}]}))


def test_two_runs_become_one_summary(tmp_path: Path) -> None:
    run(tmp_path / PLAIN, [[0, 0, 0], [0, 0]], [[5, 6, 7], [8, 9]], 100.0)
    run(tmp_path / SPECULATIVE, [[1, 0], [1]], [[5, 6, 7], [8, 4]], 150.0)
    summary, counts, answers = read_runs(tmp_path, "make demo")
    assert {name: summary[name] for name in list(SUMMARY)[:6]} == {
        "rows": 2,
        "rows_differing": 1,
        "plain_tokens_per_second": 100.0,
        "tokens_per_second": 150.0,
        "speedup": 1.5,
        "acceptance_length": 1.667,
    }
    assert counts.acceptance_histogram == [1, 2]
    assert [answer.row["request_id"] for answer in answers] == ["0", "1"]


def test_accepted_draft_tokens_are_marked_and_the_end_token_is_left_out() -> None:
    assert answer_text(ANSWER, colour=False) == "[ a b] c d[ e]"
    assert answer_text(ANSWER, colour=True) == "\033[32m a b\033[0m c d\033[32m e\033[0m"


def test_a_long_answer_is_cut() -> None:
    steps = [Step(number, 1, (MarkedText("a"),), "b") for number in range(100)]
    assert answer_text(Example({"text": "ab" * 100}, "", steps), colour=False) == "[a]b" * 80 + " …"


def test_the_screen_shows_both_rates_and_their_ratio() -> None:
    counts = DecodeCounts(num_output_tokens=5, num_decode_steps=2, acceptance_histogram=[1, 0, 1])
    lines = screen(SUMMARY, counts, [ANSWER], colour=False)
    assert "> Why?" in lines
    assert "tokens/s                            100.0         150.0   1.50 times as fast" in lines
    assert "tokens a step                        1.00          2.50" in lines
    assert "rows whose tokens differ                              0 of 2" in lines
    assert sum("█" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"rows_differing": 1}, "Rows differ"),
        (
            {"speedup": 1.1},
            "Speculation gained little. On this machine, draft tokens cost about what they save, or more.",
        ),
        (
            {"speedup": 0.9, "load_average": 9.0},
            "Speculation was slower than plain decoding. The machine is busy: 9 processes on average want its 2 cores",
        ),
        ({"choice": ["Plain decoding at 1 row: …."]}, "Plain decoding at 1 row: …."),
        ({"speedup": 1.0, "speculated_share": 0.1, "model": None}, "weights lie in the processor's caches"),
    ],
)
def test_what_is_not_as_promised_is_said(changes: dict[str, Any], said: str) -> None:
    lines = judgement({**SUMMARY, **changes})
    assert said in " ".join(lines)
    assert bool(lines) == bool(changes)


def test_the_next_command_has_the_model() -> None:
    assert closing(Path("build/demo"), "folder")[-1].endswith(
        "drafter generate --input FILE --output results --model folder"
    )
    assert closing(Path("build/demo"), None)[-1].endswith("--output results")


def test_colours_are_for_terminals_whose_owner_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert in_colour(Terminal())
    assert not in_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not in_colour(Terminal())
