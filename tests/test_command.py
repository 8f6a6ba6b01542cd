"""The command `drafter`, the help of all jobs, and folders of a user that have our packages' names."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.command import main
from pipeline.command_line import did_you_mean
from tests.support.paths import ROOT

JOBS = [file.stem for file in sorted((ROOT / "jobs").glob("*.py")) if file.stem not in ("__init__", "command")]
HEAVY = ("torch", "ray", "transformers", "pandas", "matplotlib")
SCRIPT = "import sys\nfrom drafter_command import main\nsys.exit(main())\n"
"""What an installer writes for a console script."""
MISTAKE = "error: nowhere is not the output of a generation job: it has no run.json"


def help_of(job: str, option: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"jobs.{job}").main([option])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_command_lists_all_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert sorted(re.findall(r"^  (\w+) ", capsys.readouterr().out, re.MULTILINE)) == JOBS
    assert main(["--version"]) == 0
    assert re.fullmatch(r"drafter \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert main(["generat"]) == 2
    assert capsys.readouterr().err == "error: there is no job 'generat': did you mean generate?\n"


@pytest.mark.parametrize("job", JOBS)
def test_help_keeps_the_lines_of_examples(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = help_of(job, "--help", capsys)
    assert re.search(rf"^  drafter {job} ", page, re.MULTILINE)
    assert all(len(line) < 130 for line in page.splitlines())
    assert len(re.findall(r"^  --", page, re.MULTILINE)) <= 35


def test_common_settings_come_first_and_all_of_them_are_to_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    page, everything = (help_of("generate", option, capsys) for option in ("--help", "--help-all"))
    assert "      --model meta-llama/Llama-3.2-1B-Instruct --sampling.temperature 0.7\n" in page
    options = re.findall(r"^  --([\w.]+)", page, re.MULTILINE)
    assert options[:5] == ["input", "output", "model", "drafter", "sampling.max_new_tokens"]
    assert "verifier.settings" not in page
    assert {*options, "verifier.settings", "learning.enabled"} <= {
        *re.findall(r"^  --([\w.]+)", everything, re.MULTILINE)
    }


def test_no_help_and_no_mistake_waits_for_heavy_imports() -> None:
    code = f"""
import importlib, sys
for job in {JOBS}:
    main = importlib.import_module(f"jobs.{{job}}").main
    try:
        main(["--help"])
    except SystemExit:
        pass
    assert main(["--no-such-option", "x"]) == 2, job
print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert lines[-1] == "[]"
    assert len(lines) == len(JOBS) + 1
    assert all(line.startswith("error: ") for line in lines[:-1])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sampling.temprature", ": did you mean sampling.temperature?"),
        ("max_num_seq", ": did you mean engine.max_num_seqs?"),
        ("colour", ""),
    ],
)
def test_slips_are_told_from_other_names(name: str, hint: str) -> None:
    assert did_you_mean(name, ["engine.max_num_seqs", "sampling.temperature", "sampling.top_p"]) == hint


def users_folder(folder: Path, *names: str) -> dict[str, str]:
    """A working directory with packages of these names; returns the environment of one who has installed ours."""
    for name in names:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('this is the user's own')\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "drafter").write_text(SCRIPT)
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("path", [str(ROOT), pytest.param(f".:{ROOT}", marks=pytest.mark.slow)])
def test_folders_of_a_user_do_not_hide_ours(tmp_path: Path, path: str) -> None:
    """Nor do files, nor where the working directory comes first on the path, as in Ray's jobs."""
    environment = users_folder(tmp_path, "pipeline", "drafter") | {"PYTHONPATH": path}
    (tmp_path / "jobs.py").write_text("raise ImportError('this is the user's own')\n")
    command = [sys.executable, str(tmp_path / "bin" / "drafter"), "report", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, MISTAKE + "\n")


@pytest.mark.slow
def test_a_module_that_runs_beside_a_folder_of_our_name_says_which_it_takes(tmp_path: Path) -> None:
    environment = users_folder(tmp_path, "pipeline")
    command = [sys.executable, "-m", "jobs.report", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    note, error = done.stderr.splitlines()
    assert note == f"note: {tmp_path}/pipeline has the name of a package of ours, in {ROOT}, which is used"
    assert (done.returncode, error) == (2, MISTAKE)


def test_what_workers_do_first_makes_them_import_ours(tmp_path: Path) -> None:
    environment = users_folder(tmp_path, "jobs", "pipeline", "drafter")
    pickling = "from pipeline.cluster.ray_cluster import _own_packages; from ray import cloudpickle; import sys; "
    pickling += "sys.stdout.buffer.write(cloudpickle.dumps(_own_packages()['worker_process_setup_hook']))"
    hook = subprocess.run([sys.executable, "-P", "-c", pickling], cwd=tmp_path, env=environment, capture_output=True)
    assert hook.returncode == 0, hook.stderr.decode()
    (tmp_path / "hook").write_bytes(hook.stdout)
    worker = "import pickle, sys; pickle.load(open('hook', 'rb'))(); sys.path.insert(0, ''); "
    worker += "import pipeline.io.listing; print(pipeline.io.listing.__file__)"
    done = subprocess.run([sys.executable, "-P", "-c", worker], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{ROOT}/pipeline/io/listing.py\n", done.stderr
