"""The report page: what it says is what the files say, and foreign text stays text."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Page as BrowserPage
from playwright.sync_api import sync_playwright
from transformers import AutoTokenizer

from drafter.embedded import EMBEDDED_BASE
from drafter.statistics import DecodeCounts, statistics_columns
from pipeline.generate.generate_job import main as generate
from pipeline.io.files import locate
from pipeline.output.output_folder import OutputFolder
from pipeline.output.part_files import ERROR_SCHEMA
from pipeline.report.axes import rates_over_time, scale, shares
from pipeline.report.cost import Cost, cost_of
from pipeline.report.report_job import main
from pipeline.report.row_scan import open_rows, read_errors, read_full, read_rows
from pipeline.report.row_steps import Step, steps_of, text_pieces
from tests.pipeline.conftest import HOSTILE, JOB_SETTINGS, FinishedJob, job_arguments

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
BEGUN = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


# ---- the parts


def test_a_step_is_its_accepted_run_and_the_token_after_it() -> None:
    pieces = ["a", "b", "c", "d", "e", "f"]
    assert steps_of(pieces, [2, 0, 1]) == [Step(1, 2, "ab", "c"), Step(2, 0, "", "d"), Step(3, 1, "e", "f")]
    # A row that ended inside its last run has no token after it.
    assert steps_of(pieces, [3, 2]) == [Step(1, 3, "abc", "d"), Step(2, 2, "ef", "")]
    assert steps_of([], []) == []


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED_BASE)


@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=60))
def test_pieces_join_to_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = text_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_special_tokens_are_seen_and_numbers_stand_in_for_a_lost_tokenizer(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    ids = [*tokenizer("pens", add_special_tokens=False)["input_ids"], end]
    assert text_pieces(tokenizer, ids)[-1] == tokenizer.eos_token
    assert text_pieces(None, [5, 17]) == ["5 ", "17 "]


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (0.0, [0.0, 1.0]),
        (1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.17, [0.0, 0.05, 0.1, 0.15, 0.2]),
        (655.0, [0.0, 200.0, 400.0, 600.0, 800.0]),
    ],
)
def test_scales_are_round(highest: float, ticks: list[float]) -> None:
    assert scale(highest) == pytest.approx(ticks)


@given(st.floats(1e-6, 1e12))
def test_scales_hold_what_they_measure(highest: float) -> None:
    ticks = scale(highest)
    assert highest <= ticks[-1] * (1 + 1e-6)
    assert 3 <= len(ticks) <= 6


def test_rates_over_time_are_tokens_by_the_seconds_there_were() -> None:
    second = int(BEGUN.timestamp())
    assert rates_over_time({}) is None
    chart = rates_over_time({second: (1, 30), second + 2: (2, 60)})
    assert chart is not None
    assert [bar.value for bar in chart.bars] == [30.0, 0.0, 60.0]
    assert chart.bars[2].text == "60 tokens/s, 2 rows"
    assert chart.marks[0] == (0.0, "03:04:05")
    # Long jobs get wider bars; the outer ones count only the seconds that there were.
    hours = rates_over_time({second + index: (1, 10) for index in range(7200)})
    assert hours is not None
    assert len(hours.bars) <= 90
    assert {bar.value for bar in hours.bars} == {10.0}
    assert "in each 2 minutes" in hours.title
    years = rates_over_time({0: (1, 86400), 10**9: (1, 5)})
    assert years is not None
    assert len(years.bars) <= 91


def test_shares_are_labelled() -> None:
    chart = shares("t", "depth", [("1", 0.5), ("2", 0.125)])
    assert [(bar.label, bar.text) for bar in chart.bars] == [("1", "50.0%"), ("2", "12.5%")]
    assert chart.ticks[-1][1] == "60%"


def submission(**facts: Any) -> dict[str, Any]:
    known = {"rows": 10, "seconds": 5.0, "device": "a GPU", "gpu_seconds": 20.0, "cpu_seconds": 40.0}
    return {**known, **facts}


def test_cost_is_of_all_submissions_or_not_known() -> None:
    two = [submission(), submission(rows=12, seconds=1.0, gpu_seconds=4.0)]
    cost = cost_of(two, rows=20, tokens=6000)  # two rows were done twice: they are paid for
    assert cost == Cost("GPU-seconds", 24.0, 6.0, 6000, ("a GPU",))
    assert cost.per_thousand == pytest.approx(4.0)
    on_cpu = cost_of([submission(gpu_seconds=0.0)], rows=10, tokens=1000)
    assert isinstance(on_cpu, Cost)
    assert (on_cpu.unit, on_cpu.per_thousand) == ("CPU-seconds", 40.0)
    for given_, rows, tokens, why in (
        ([], 10, 5, "missing"),
        ([submission()], 11, 5, "tells of 10 of the 11 rows"),
        ([submission()], 10, 0, "no token"),
        ([submission(gpu_seconds=0.0, cpu_seconds=0.0)], 10, 5, "not noted"),
    ):
        said = cost_of(given_, rows, tokens)
        assert isinstance(said, str)
        assert why in said


# ---- the pass over the rows


def write_output(folder: Path, parts: list[list[dict[str, Any]]], errors: list[dict[str, Any]]) -> OutputFolder:
    """An output with these rows: `accepted` is what each step accepted, the rest has defaults."""
    (folder / "data").mkdir(parents=True)
    (folder / "errors").mkdir()
    for number, rows in enumerate(parts):
        full = []
        for row in rows:
            counts = DecodeCounts()
            for accepted in row["accepted"]:
                counts.record_step(emitted=accepted + 1, accepted=accepted, drafted=4)
            tokens = counts.num_output_tokens
            full.append(
                {
                    "request_id": row["id"],
                    "category": row.get("category"),
                    "prompt_token_ids": [20, 21],
                    "token_ids": row.get("token_ids", [30] * tokens),
                    "finish_reason": "length",
                    "num_prompt_tokens": 2,
                    "num_output_tokens": tokens,
                    **statistics_columns(counts),
                    "generation_seconds": row.get("seconds", 1.0),
                    "finished_at": BEGUN + timedelta(seconds=row.get("at", 0)),
                }
            )
        pa.parquet.write_table(pa.Table.from_pylist(full), folder / "data" / f"{number}.parquet")
    if errors:
        table = pa.Table.from_pylist(errors, schema=ERROR_SCHEMA)
        pa.parquet.write_table(table, folder / "errors" / "0.parquet")
    return OutputFolder(locate(str(folder)))


def test_the_pass_adds_up_all_files(tmp_path: Path) -> None:
    output = write_output(
        tmp_path / "out",
        [
            [{"id": "a", "accepted": [2, 0], "category": "x", "at": 0.9, "seconds": 3.0}],
            [
                {"id": "b", "accepted": [1], "category": "y", "at": 1.2, "seconds": 9.0},
                {"id": "c", "accepted": [4, 4], "category": "x", "at": 0.1, "seconds": 1.0},
            ],
        ],
        [{"request_id": f"e{n}", "input": "{}", "error_type": "Bad" + "XY"[n % 2], "message": "m"} for n in range(7)],
    )
    rows = read_rows(open_rows(output), "category", by_file=False, slowest=2, drawn=2)
    assert (rows.rows, rows.prompt_tokens) == (3, 6)
    assert rows.counts.num_output_tokens == 4 + 2 + 10
    assert rows.counts.acceptance_histogram == [1, 1, 1, 0, 2]
    assert rows.counts.num_draft_tokens == 20
    assert {name: (group.rows, group.counts.num_output_tokens) for name, group in rows.groups.items()} == {
        "x": (2, 14),
        "y": (1, 2),
    }
    second = int(BEGUN.timestamp())
    assert rows.by_second == {second: (2, 14), second + 1: (1, 2)}
    assert [row.request_id for row in rows.slowest] == ["b", "a"]
    assert len(rows.drawn) == 2
    assert [row["request_id"] for row in read_full(output, rows)] == rows.drawn
    # The same rows are drawn whatever the files, so that two outputs can be compared.
    other = write_output(tmp_path / "other", [[{"id": name, "accepted": [0]} for name in "cba"]], [])
    assert read_rows(open_rows(other), None, by_file=False, slowest=0, drawn=2).drawn == rows.drawn

    errors = read_errors(output, each=2)
    assert (errors.rows, dict(errors.kinds)) == (7, {"BadX": 4, "BadY": 3})
    assert [row["request_id"] for row in errors.examples] == ["e0", "e2", "e1", "e3"]


def test_rows_are_grouped_by_their_file_where_there_is_no_category(tmp_path: Path) -> None:
    output = write_output(tmp_path, [[{"id": f"{f}.jsonl:{n}", "accepted": [n]} for f in "ab" for n in range(2)]], [])
    rows = read_rows(open_rows(output), None, by_file=True, slowest=1, drawn=0)
    assert {name: group.rows for name, group in rows.groups.items()} == {"a.jsonl": 2, "b.jsonl": 2}
    assert read_full(output, rows) == []


# ---- the page


class Page(HTMLParser):
    """A page's tags and texts; fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.answers: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if ("class", "answer") in attrs:
            self.answers.append("")
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "span" in self.open[-1:] and self.answers:
            self.answers[-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def job(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def outputs(finished_job: FinishedJob, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A drafted and a plain output of the same rows, some of them hostile, some of them errors."""
    folder = tmp_path_factory.mktemp("outputs")
    shutil.copytree(finished_job.outcome.folder, folder / "drafted")
    arguments = job_arguments(finished_job.source, folder / "plain", model, *JOB_SETTINGS, drafter="none")
    assert generate(arguments) == 0
    return folder / "drafted", folder / "plain"


def test_the_page_of_a_real_job(outputs: tuple[Path, Path], model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafted, plain = outputs
    capsys.readouterr()
    assert job(drafted, "--against", plain) == 0
    assert capsys.readouterr().out.strip() == str(drafted / "report.html")
    text = (drafted / "report.html").read_text()
    page = Page(text)

    # Nothing is loaded, nothing is run, and what people wrote is text.
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert not [value for name, value in page.attributes if name.startswith("on")]
    links = {value for name, value in page.attributes if name in ("src", "href")}
    assert all(link == "data:," or str(link).startswith("#") for link in links)
    assert "default-src 'none'" in text
    for foreign in (HOSTILE, "<b>fruit</b>"):
        assert " ".join(foreign.split()) in page.text
    assert "49" not in [one.strip() for one in page.texts]  # `{{ 7 * 7 }}` is not a template

    # The figures are those of the files.
    rows = [row for path in (drafted / "data").iterdir() for row in pa.parquet.read_table(path).to_pylist()]
    tokens, steps = (sum(row[name] for row in rows) for name in ("num_output_tokens", "num_decode_steps"))
    assert f"Rows finished {len(rows)} of 9" in page.text
    assert "2 in all: 1 BadPrompt, 1 BadRow" in page.text or "2 in all: 1 BadRow, 1 BadPrompt" in page.text
    assert f"New tokens {tokens:,}" in page.text
    assert f"β, tokens a forward {tokens / steps:.2f}" in page.text
    assert "β by category" in page.text
    assert "(none) 3" in page.text

    # Cost on CPUs, against plain decoding, which has the same tokens.
    status = json.loads((drafted / "status.json").read_text())
    seconds = sum(one["cpu_seconds"] for one in status["submissions"])
    assert f"CPU-seconds for 1,000 new tokens {1000 * seconds / tokens:.3g}" in page.text
    assert "times as much as in" in page.text
    assert "7 of 7 rows that were drawn from both have the same tokens" in page.text
    assert "Not the same in both" not in page.text

    # Each example is its row's tokens, step by step; the ends of lines are marked.
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps_shown = [steps_of(text_pieces(tokenizer, row["token_ids"]), row["per_step_accepted"]) for row in rows]
    texts = ["".join(step.drafted + step.own for step in steps) for steps in steps_shown]
    assert sorted(map(one_line, page.answers)) == sorted(map(one_line, texts))
    assert page.tags.count("article") == 7
    runs = sum(step.drafted != "" for steps in steps_shown for step in steps)  # some tokens are parts of a character
    assert text.count('<span class="run ') == page.tags.count("sup") == runs > 0


def one_line(text: str) -> str:
    """A text without the ends of its lines, and without the page's marks for them."""
    return re.sub("[↵\\n\\r]", "", text)


def test_what_is_not_known_is_said(outputs: tuple[Path, Path], tmp_path: Path) -> None:
    drafted, plain = tmp_path / "drafted", outputs[1]
    shutil.copytree(outputs[0], drafted)
    (drafted / "status.json").unlink()
    page = tmp_path / "page.html"
    assert job(drafted, "--page", page, "--category", "request_id", "--examples", 0) == 0
    found = Page(page.read_text())
    assert "What this output cost is not known: status.json, which tells" in found.text
    assert "What plain decoding of the same rows would have cost is not known" in found.text
    assert "β by request_id" in found.text
    assert "article" not in found.tags
    # Compared with an output that is not plain decoding, and of other rows.
    assert job(plain, "--against", drafted, "--page", page) == 0
    said = Page(page.read_text()).text
    assert "What " + str(drafted) + " cost is not known" in said
    assert "nothing was drafted" in said


def test_steps_and_texts_that_are_lost_are_said(tmp_path: Path) -> None:
    output = write_output(tmp_path / "out", [[{"id": "a", "accepted": [1, 1]}]], [])
    sampling = {"temperature": 0.0, "max_new_tokens": 4, "seed": 0}
    config = {"input": "in", "model": "no/such-model", "drafter": "x", "reading": {"id_column": "id"}}
    versions = dict.fromkeys(["drafter", "torch", "transformers", "ray"])
    run = {"config": {**config, "sampling": sampling}, "state": "running", "versions": versions, "git_commit": None}
    output.run_file.write_text(json.dumps({**run, "meaning": {}}))
    assert job(tmp_path / "out") == 0
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert "Tokens are shown as numbers: the tokenizer of no/such-model is not on this machine" in page.text
    assert page.answers == ["30 30 30 30 "]
    assert page.tags.count("sup") == 2
    (path,) = (tmp_path / "out" / "data").iterdir()
    pa.parquet.write_table(pa.parquet.read_table(path).drop_columns("per_step_accepted"), path)
    assert job(tmp_path / "out") == 0
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert "The steps cannot be shown: the output has no column per_step_accepted" in page.text
    assert page.answers == ["30 30 30 30 "]
    assert "sup" not in page.tags


def test_bad_input_of_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: Any) -> str:
        assert job(*arguments) == 2
        said = capsys.readouterr().err.strip()
        assert said.count("\n") == 0
        return said

    assert "is not the output of a generation job" in error(tmp_path)
    output = write_output(tmp_path / "out", [[{"id": "a", "accepted": [1]}]], [])
    run = {"config": {"model": None, "reading": {"id_column": None}}, "meaning": {}, "versions": {}}
    output.run_file.write_text(json.dumps(run))
    assert "no column 'topic' to group by (it has request_id, category" in error(
        tmp_path / "out", "--category", "topic"
    )
    assert "--examples must be at least 0" in error(tmp_path / "out", "--examples", -1)
    for path in (tmp_path / "out" / "data").iterdir():
        pa.parquet.write_table(pa.table({"x": [1]}), path)
    assert "is not of jobs.generate: its rows have no request_id" in error(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "data")
    assert "has no finished rows" in error(tmp_path / "out")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
def test_the_page_in_a_browser(outputs: tuple[Path, Path], tmp_path: Path) -> None:
    drafted, plain = outputs
    assert job(drafted, "--against", plain, "--page", tmp_path / "page.html") == 0
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        inks = {
            look(browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme), tmp_path, width)
            for scheme in SCHEMES
            for width in (375, 1440)
        }
        browser.close()
    assert len(inks) == len(SCHEMES)


def look(page: BrowserPage, folder: Path, width: int) -> str:
    """Open the page as a person would, and return the colour of its text."""
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((folder / "page.html").as_uri())
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    # Nothing sticks out at the side; wide tables scroll by themselves.
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # Bars can be seen, and prompts open with the keyboard.
    assert page.locator(".bars > div").first.evaluate("bar => bar.offsetWidth * bar.offsetHeight") > 1
    page.locator("article summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("article .prompt").first.is_visible()
    return str(page.evaluate("getComputedStyle(document.body).color"))
