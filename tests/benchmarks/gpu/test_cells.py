"""Stages that are interrupted, fail, run out of time or are killed in a cell, and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import KITS, main, run
from benchmarks.gpu.cells import CellFile, Key, Measure, Plan, Stage, Values
from benchmarks.gpu.page import PAGE_FILE, STAGES, write_page
from benchmarks.gpu.profile import kind_of
from drafter.errors import LoadError
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

PLAN = Plan("model", "ctc", tiny=True)
NUMBERS: list[Key] = [{"number": number} for number in range(4)]


def stage(measure: Measure) -> Stage:
    return Stage("numbers", "Numbers.", lambda plan: NUMBERS, lambda plan: measure, lambda cell, values: cell | values)


def go(folder: Path, measure: Measure, minutes: float = 1.0, run_name: str = "first") -> int:
    return run(stage(measure), PLAN, folder, minutes, run_name, "command")


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(CellFile(folder, "numbers", {}).lines())


def square(cell: Key) -> Values:
    return {"square": cell["number"] ** 2}


class Broken:
    """Measures, but what goes wrong with some numbers, and notes which it was asked for."""

    def __init__(self, wrong: Mapping[int, BaseException]) -> None:
        self.wrong, self.asked = wrong, list[int]()

    def __call__(self, cell: Key) -> Values:
        self.asked.append(cell["number"])
        if cell["number"] in self.wrong:
            raise self.wrong[cell["number"]]
        return square(cell)


def test_each_cell_is_measured_once(tmp_path: Path) -> None:
    assert go(tmp_path, square) == 0
    assert [line["values"]["square"] for line in lines(tmp_path)] == [0, 1, 4, 9]
    assert {line["environment"]["command"] for line in lines(tmp_path)} == {"command"}
    again = Broken({})
    assert go(tmp_path, again, run_name="second") == 0
    assert again.asked == []


def test_who_is_interrupted_goes_on_with_the_same_cell(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, Broken({2: KeyboardInterrupt()}))
    again = Broken({})
    assert go(tmp_path, again, run_name="second") == 0
    assert again.asked == [2, 3]
    assert len(lines(tmp_path)) == 4


def test_what_fails_is_no_end_and_is_tried_again_in_another_run(tmp_path: Path) -> None:
    wrong = {1: ValueError("no\nsuch number"), 2: LoadError("no base")}
    assert go(tmp_path, Broken(wrong)) == 1
    assert [line.get("error") for line in lines(tmp_path)] == [None, "ValueError: no", "no base", None]
    same, other = Broken({}), Broken({})
    assert go(tmp_path, same) == 0
    assert go(tmp_path, other, run_name="second") == 0
    assert (same.asked, other.asked) == ([], [1, 2])


def test_no_cell_begins_when_the_time_is_over(tmp_path: Path) -> None:
    assert go(tmp_path, square, minutes=0) == 1
    assert lines(tmp_path) == []


def test_a_torn_line_is_written_again(tmp_path: Path) -> None:
    go(tmp_path, square)
    file = tmp_path / "numbers.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    again = Broken({})
    assert go(tmp_path, again) == 0
    assert again.asked == [3]
    assert [line["cell"]["number"] for line in lines(tmp_path)] == [0, 1, 2, 3]


def test_another_model_or_version_is_measured_anew(tmp_path: Path) -> None:
    file, other = (CellFile(tmp_path, "numbers", {"model": name}) for name in ("one", "two"))
    file.write(NUMBERS[0], "first", {}, {"values": {}})
    assert file.left(NUMBERS, "first") == NUMBERS[1:]
    assert other.left(NUMBERS, "first") == NUMBERS


def test_a_cell_that_the_process_dies_in_is_passed_over(tmp_path: Path) -> None:
    file = CellFile(tmp_path, "numbers", {})

    def die(number: int) -> bool:
        noted = (tmp_path / "numbers.begun").read_text() if (tmp_path / "numbers.begun").exists() else None
        with file.begun(NUMBERS[number]) as worth_it:
            left = (tmp_path / "numbers.begun").read_text()
        assert noted is None or noted != left
        (tmp_path / "numbers.begun").write_text(left)  # as one that is killed leaves it
        return worth_it

    assert [die(2), die(2), die(2)] == [True, True, False]
    assert die(1)


def test_a_torn_note_of_the_cell_under_way_is_no_obstacle(tmp_path: Path) -> None:
    file = CellFile(tmp_path, "numbers", {})
    for torn in ("", '{"cell": {"num'):
        (tmp_path / "numbers.begun").write_text(torn)
        with file.begun(NUMBERS[0]) as worth_it:
            assert worth_it
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [3, -signal.SIGSEGV])
def test_a_stage_whose_process_dies_before_its_first_cell_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    started: list[list[str]] = []

    def die(command: list[str]) -> subprocess.CompletedProcess[str]:
        started.append(command)
        assert len(started) < 20, "it is started for ever"
        if len(started) in (3, 4):  # these have measured a cell before
            CellFile(tmp_path, "operators", {}).write({"place": len(started)}, "first", {}, {"values": {}})
        return subprocess.CompletedProcess(command, code if command[4] == "operators" else 0)

    monkeypatch.setattr("benchmarks.gpu.__main__.subprocess.run", die)
    with pytest.raises(SystemExit, match="not all has a result: operators"):
        main(["--output", str(tmp_path), "--stage", "operators", "--stage", "costs"])
    assert [command[4] for command in started] == ["operators"] * 7 + ["costs"]


def test_the_page_has_the_newest_line_of_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.page.STAGES", (stage(square),))
    go(tmp_path, Broken({1: ValueError("bad")}))
    assert "**no result**" in write_page(tmp_path)
    go(tmp_path, square, run_name="second")
    page = write_page(tmp_path)
    assert "**no result**" not in page
    assert "| 3 | 9 |" in page
    assert (tmp_path / PAGE_FILE).read_text(encoding="utf-8") == page


@pytest.mark.parametrize("plan", [PLAN, Plan("model", "ctc", tiny=False)], ids=str)
def test_cells_of_every_stage_are_told_apart(plan: Plan) -> None:
    for one in STAGES:
        cells = one.cells(plan)
        assert cells
        assert len({str(cell) for cell in cells}) == len(cells)


def test_a_kit_is_of_stages_that_there_are_and_shares_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name.partition(":")[0] for names in KITS.values() for name in names} <= {one.name for one in STAGES}
    for one in STAGES:  # none of them is empty
        cells = one.cells(Plan("model", "ctc", tiny=False))
        assert any(map(one.first, cells))
    given: list[float] = []

    def note(command: list[str]) -> subprocess.CompletedProcess[str]:
        given.append(float(command[command.index("--minutes") + 1]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("benchmarks.gpu.__main__.subprocess.run", note)
    main(["--output", str(tmp_path), "--kit", "correctness", "--tiny"])
    assert len(given) == len(KITS["correctness"])
    assert 4.0 >= given[0] > given[1] > given[-1] > 0


def test_kinds_of_kernels() -> None:
    names = {
        "matmul": ["sm90_xmma_gemm_bf16", "nvjet_tst_64x8", "aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"],
        "attention": ["fmha_cutlassF_bf16", "aten::_scaled_dot_product_efficient_attention"],
        "norm": ["aten::native_layer_norm", "triton_red_fused_rsqrt_0"],
        "sampling": ["aten::argmax", "cub::DeviceRadixSort", "softmax_forward"],
        "copy": ["Memcpy DtoD", "aten::index_copy_", "CatArrayBatchedCopy"],
        "other": ["vectorized_elementwise_kernel", "aten::add"],
    }
    assert {name: kind_of(name) for some in names.values() for name in some} == {
        name: kind for kind, some in names.items() for name in some
    }


@pytest.mark.slow
def test_a_machine_needs_little() -> None:
    """No Ray and nothing to plot with, for example; and what is imported by name is there."""
    missing = ("ray", "matplotlib", "pyarrow", "accelerate", "pydantic", "jsonargparse", "fastapi")
    program = f"import sys; sys.modules.update(dict.fromkeys({missing})); import benchmarks.gpu.__main__"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.slow
def test_a_stage_that_is_killed_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path), "--stage", "operators", "--tiny"]
    file = CellFile(tmp_path, "operators", {})
    process = subprocess.Popen(command, cwd=ROOT)
    wait_until(lambda: len(list(file.lines())) >= 3, "three results")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    found = [str(line["cell"]) for line in file.lines()]
    assert len(found) == len(set(found)) == len(next(one for one in STAGES if one.name == "operators").cells(PLAN))


def test_results_say_what_was_wrong(tmp_path: Path) -> None:
    """Every operator is exact where the device is the CPU; another number of it would be seen."""
    operators = next(one for one in STAGES if one.name == "operators")
    measure: Callable[[Key], Values] = operators.prepare(PLAN)
    for cell in operators.cells(PLAN):
        assert measure(cell) == {"integers that differ": 0, "largest difference": 0.0}, cell
