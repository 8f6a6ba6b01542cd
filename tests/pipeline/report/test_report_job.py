"""The report page: what it says is what the files say, and foreign text stays text."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet
import pytest
from playwright.sync_api import Page as BrowserPage
from playwright.sync_api import sync_playwright
from transformers import AutoTokenizer

from jobs.generate import main as generate
from jobs.report import main
from pipeline.output.folder import OutputFolder
from pipeline.progress.board import LearningReport
from pipeline.report.page import steps_of, text_pieces
from tests.pipeline.conftest import HOSTILE, JOB_SETTINGS, FinishedJob, job_arguments
from tests.pipeline.report.outputs import write_output
from tests.support.damage import cut

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


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
    assert f"Acceptance length {tokens / steps:.2f}" in page.text
    assert "Acceptance length by category" in page.text
    assert "(none) 3" in page.text

    # Cost on CPUs, against plain decoding, which has the same tokens.
    status = json.loads((drafted / "status.json").read_text())
    seconds = sum(one["cpu_seconds"] for one in status["submissions"])
    assert f"CPU-seconds for 1,000 new tokens {1000 * seconds / tokens:.3g}" in page.text
    rates = [json.loads((one / "status.json").read_text())["tokens_per_second"] for one in outputs]
    (said,) = re.findall(r"This output was made ([\d.]+) times as fast as", page.text)
    assert float(said) == pytest.approx(rates[0] / rates[1], abs=0.006)  # as the terminal says
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
    assert "What this output cost is not known: status.json, which says" in found.text
    assert "What plain decoding of the same rows would have cost is not known" in found.text
    assert "Acceptance length by request_id" in found.text
    assert "article" not in found.tags
    # Compared with an output that is not plain decoding, and of other rows.
    assert job(plain, "--against", drafted, "--page", page) == 0
    said = Page(page.read_text()).text
    assert "What " + str(drafted) + " cost is not known" in said
    assert "nothing was drafted" in said
    assert "The other output is not plain decoding: its drafter was ngram" in said


def write_run(output: OutputFolder, **facts: Any) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 4, "seed": 0}
    config = {"input": "in", "model": "no/such-model", "drafter": "x", "reading": {"id_column": None}}
    versions = dict.fromkeys(["drafter", "torch", "transformers", "ray"])
    run = {"config": {**config, "sampling": sampling}, "state": "running", "versions": versions, "git_commit": None}
    output.run_file.write_text(json.dumps({**run, "meaning": {}, **facts}))


def test_tokens_that_were_accepted_leniently_are_counted_and_marked(tmp_path: Path) -> None:
    marks = {"lossless": False, "verifier": "fly", "num_lenient_tokens": 2, "lenient_positions": [0, 3]}
    rows = [{"id": "a", "accepted": [2, 1], "token_ids": [11, 12, 13, 14, 15], "marks": marks}]
    write_run(write_output(tmp_path / "out", [rows], []), lossless=False, verifier="fly")
    assert job(tmp_path / "out") == 0
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert "2 tokens accepted by the verifier fly" in page.text
    assert "In red are draft tokens" in page.text
    assert page.attributes.count(("class", "lenient")) == 2
    assert page.answers == ["11 12 13 14 15 "]


def test_what_drafting_was_worth_is_said(tmp_path: Path) -> None:
    said = {"estimated_speedup": 1.31, "margin": 0.04, "speculated_share": 0.92, "sentences": ["Memory drafts <here>."]}
    output = write_output(tmp_path / "out", [[{"id": "a", "accepted": [1]}]], [])
    write_run(output, speculation=said)
    took = {"rows": 1, "tokens": 2, "seconds": 2.0, "gpu_seconds": 2.0, "cpu_seconds": 4.0, "device": "a GPU"}
    now = {"state": "finished", "rows_total": 1, "failure": None, "last_crash": None, "updated_at": "now"}
    output.status_file.write_text(json.dumps({**now, "submissions": [took]}))
    assert job(tmp_path / "out") == 0
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert "tokens/s, over 2.0 s; decode steps about 1.31 times as fast as plain decoding" in page.text
    assert "Memory drafts <here>." in page.text
    assert "The decode steps were about 1.31 times as fast as plain decoding of the same rows, by estimate" in page.text


@pytest.mark.parametrize(("facts", "by_file"), [({"named_by": None}, True), ({"named_by": "id"}, False), ({}, False)])
def test_rows_are_grouped_by_file_only_where_files_name_them(
    tmp_path: Path, facts: dict[str, Any], by_file: bool
) -> None:
    output = write_output(tmp_path / "out", [[{"id": f"doc{n}:3", "accepted": [1]} for n in range(2)]], [])
    for path in (tmp_path / "out" / "data").iterdir():
        pa.parquet.write_table(pa.parquet.read_table(path).drop_columns("category"), path)
    write_run(output, **facts)
    assert job(tmp_path / "out") == 0
    assert ("by source file" in Page((tmp_path / "out" / "report.html").read_text()).text) == by_file


def test_an_output_of_plain_decoding_has_no_shares_of_no_drafts(outputs: tuple[Path, Path], tmp_path: Path) -> None:
    assert job(outputs[1], "--page", tmp_path / "page.html") == 0
    page = Page((tmp_path / "page.html").read_text())
    assert "Every step was plain decoding, and gave one token: nothing was drafted." in page.text
    assert "Share of steps" not in page.text


def test_what_a_learner_did_last_is_said(tmp_path: Path) -> None:
    output = write_output(tmp_path / "out", [[{"id": "a", "accepted": [1]}]], [])
    report = LearningReport("learning", "it trains for 10% of the time", steps=1200, seconds=61.0)
    for found, said in (
        (report, "No version of the head was published."),
        (
            replace(report, version=2, published_beta=3.0),
            "The newest version of the head is 2. On rows held out, its acceptance length was 3.00.",
        ),
        (report, "The learner was learning at last (it trains for 10% of the time), after 1,200 steps in 61.0 s."),
    ):
        write_run(output, learning=asdict(found))
        assert job(tmp_path / "out") == 0
        assert said in Page((tmp_path / "out" / "report.html").read_text()).text


def test_steps_and_texts_that_are_lost_are_said(tmp_path: Path) -> None:
    output = write_output(tmp_path / "out", [[{"id": "a", "accepted": [1, 1]}]], [])
    write_run(output)
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
    config = {"model": None, "reading": {"id_column": None}}
    run = {"config": config, "meaning": {}, "state": "finished", "versions": {}}
    output.run_file.write_text(json.dumps(run))
    assert "no column 'topic' to group by (it has request_id, category" in error(
        tmp_path / "out", "--category", "topic"
    )
    assert "--examples must be at least 0" in error(tmp_path / "out", "--examples", -1)
    errors = [{"request_id": "e", "input": "{}", "error_type": "Bad", "message": "m"}]
    torn = write_output(tmp_path / "torn", [[{"id": "a", "accepted": [1]}], [{"id": "b", "accepted": [1]}]], errors)
    torn.run_file.write_text(json.dumps(run))
    for name in ("errors/0.parquet", "data/1.parquet", "data/0.parquet"):
        cut(tmp_path / "torn" / name)
        for arguments in ([tmp_path / "torn"], [tmp_path / "out", "--against", tmp_path / "torn"]):
            said = error(*arguments)
            assert said.startswith(f"error: output {tmp_path / 'torn'} has rows that cannot be read: ")
            assert said.endswith("; submit its job again")
    for path in (tmp_path / "out" / "data").iterdir():
        pa.parquet.write_table(pa.table({"x": [1]}), path)
    assert "is not of drafter generate: its rows have no request_id" in error(tmp_path / "out")
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
    # Bars can be seen where there is room for them, and prompts open with the keyboard.
    area = page.locator("td.bar > div").first.evaluate("bar => bar.offsetWidth * bar.offsetHeight")
    assert (area > 1) == (width > 600)
    page.locator("article summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("article .prompt").first.is_visible()
    return str(page.evaluate("getComputedStyle(document.body).color"))
