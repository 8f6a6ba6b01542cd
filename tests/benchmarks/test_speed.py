from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import costs, speed
from drafter.embedded import EMBEDDED_BASE
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer


def cell(way: str, turn: int, seconds: float, outputs: list[list[int]], beta: float | None = None) -> speed.Cell:
    return speed.Cell(way, "short", 1, turn, seconds, list(map(len, outputs)), list(map(speed.digest, outputs)), beta)


def test_speeds_are_compared_within_a_round() -> None:
    """In the second round the machine is at half its speed."""
    cells = [
        cell(speed.PLAIN, 0, 1.0, [[1, 2], [3, 4]], 1.0),
        cell(speed.PLAIN, 1, 2.0, [[1, 2], [3, 4]], 1.0),
        cell("drafter", 0, 0.5, [[1, 2], [3, 4]], 1.9),
        cell("drafter", 1, 1.0, [[1, 2], [3, 4]], 1.9),
        cell(speed.GENERATE, 0, 2.0, [[1, 2], [3, 5]]),
        cell(speed.GENERATE, 1, 4.0, [[1, 2], [3, 4]]),
    ]
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in speed.speed_table(cells).splitlines()]
    assert rows[0] == ["way", "tokens/s", "÷ plain decoding", "÷ generate", "β", "same texts"]
    assert rows[2:] == [
        [speed.PLAIN, "3", "1.00", "2.00", "1.00", "4 of 4"],
        ["drafter", "6", "2.00", "4.00", "1.90", "4 of 4"],
        [speed.GENERATE, "2", "0.50", "1.00", "", "3 of 4"],
    ]


def test_long_prompts_are_long_and_end_in_the_question() -> None:
    tokenizer = load_tokenizer(EMBEDDED_BASE)
    short, long = (speed.prompts_of(tokenizer, context, 2) for context in ("short", "long"))
    assert all(len(ids) < 300 for ids in short)
    assert all(300 < len(ids) <= 512 for ids in long)
    question = tokenizer.decode(short[0]).strip()[-150:]
    assert tokenizer.decode(long[0]).strip().endswith(question)


def test_the_roofline_is_the_slower_of_reading_and_doing(tiny_base: BaseModel) -> None:
    weights = sum(parameter.numel() for parameter in tiny_base.decoder.parameters())
    cached = tiny_base.new_cache(1, 1).nbytes
    reading = costs.Machine(bytes_per_second=1.0, operations_per_second=1e30)
    assert reading.least_seconds(tiny_base, nodes=0, rows=1, context=9) == 4 * weights + 10 * cached
    doing = costs.Machine(bytes_per_second=1e30, operations_per_second=1.0)
    one, four = (doing.least_seconds(tiny_base, nodes=0, rows=rows, context=9) for rows in (1, 4))
    assert four == 4 * one > 2 * weights


def test_a_report_of_costs_has_every_point(tmp_path: Path) -> None:
    points = [costs.Point(nodes, 4, 256, 0.001 * nodes, 0.002, 0.0005).__dict__ for nodes in (0, 16)]
    record = {
        "environment": {
            "hardware": {"gpu": None, "processor": "abacus", "cores": 2},
            "threads": 2,
            "dtype": "float32",
            "command": "python -m benchmarks.costs",
            "commit": "abc",
        },
        "compiled": False,
        "machine": {"bytes_per_second": 2e9, "operations_per_second": 3e9},
        "cache": {"slots": 64, "length": 100, "bytes": 2**20},
        "points": points,
    }
    (tmp_path / costs.COSTS_FILE).write_text(json.dumps(record), encoding="utf-8")
    table = costs.write_report(tmp_path)
    assert "| 16 | 4 | 256 | 16.00 | 2.00 | 0.50 | 0.25 | 9.00 | 89% |" in table
    assert "2 GB/s" in (tmp_path / costs.TABLE_FILE).read_text(encoding="utf-8")
    assert (tmp_path / costs.PLOT_FILE).stat().st_size > 10_000


def test_costs_of_a_shape_need_no_trained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base: dict[str, int] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(costs, "SHAPES", {"tiny": (base | layers, {"num_heads": 2, "intermediate_size": 40})})
    for name, few in (("NODES", (0, 4, 16)), ("ROWS", (1, 4)), ("CONTEXTS", (64, 256))):
        monkeypatch.setattr(costs, name, few)
    monkeypatch.setattr(costs, "_TURNS", 2)
    costs.main(["--shape", "tiny", "--output", str(tmp_path)])
    points = json.loads((tmp_path / costs.COSTS_FILE).read_text(encoding="utf-8"))["points"]
    assert {(point["nodes"], point["rows"], point["context"]) for point in points} >= {(0, 1, 256), (16, 4, 64)}
    assert all(point["verify"] > 0 and (point["draft"] > 0) == (point["nodes"] > 0) for point in points)


def test_a_way_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--way", "by foot"])
    assert "by foot" in capsys.readouterr().err
