"""The page in a real browser."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from drafter import EngineConfig, SpeculativeLM
from pipeline.serving.keys import ENVIRONMENT, read_keys
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.local_endpoint import served
from tests.support.waiting import PATIENCE

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
HARMFUL = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page. On a busy machine all that it is asked for takes as long as it takes."""
    playwright.expect.set_options(timeout=1000 * PATIENCE)
    opened = browser.new_page()
    opened.set_default_timeout(1000 * PATIENCE)
    yield opened
    opened.close()


@pytest.fixture
def drafted(plain: SpeculativeLM) -> Iterator[SpeculativeLM]:
    """The model with a drafter."""
    config = EngineConfig(max_num_seqs=2, num_draft_tokens=8)
    with SpeculativeLM.from_pretrained(plain.base.name, "ngram", config=config) as lm:
        yield lm


@pytest.fixture
def address(plain: SpeculativeLM, drafted: SpeculativeLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with a model, the same without a drafter, and keys."""
    monkeypatch.setenv(ENVIRONMENT, "right")
    answers = {NAME: Answers(drafted, "a", seconds=PATIENCE), f"{NAME}-plain": Answers(plain, "b", seconds=PATIENCE)}
    with served(answers, read_keys(None, "required")) as address:
        yield address


def test_an_answer_comes_in_runs(page: Any, address: str, plain: SpeculativeLM) -> None:
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    expect = playwright.expect
    expect(page.locator("#status")).to_contain_text("no such API key")
    page.fill("#key", "right")
    page.press("#key", "Tab")
    expect(page.locator("#model option")).to_have_count(2)
    page.fill("#prompt", HARMFUL)
    page.fill("#tokens", "60")
    page.check("#compare")
    page.click("#run")
    expect(page.locator("#status.good")).to_contain_text("the same text")

    wanted = plain.generate([{"role": "user", "content": HARMFUL}], max_new_tokens=60)[0]
    drafted, undrafted = page.locator(".text").all()
    assert drafted.text_content() == undrafted.text_content() == wanted.text
    forwards = [int(panel.text_content()) for panel in page.locator("[data-figure=forwards]").all()]
    assert forwards[0] < forwards[1] == len(wanted.token_ids)
    assert page.locator(".answer >> nth=0 >> .run").count() > 0
    assert page.locator(".answer >> nth=1 >> .run").count() == 0
    assert page.title() == "drafter"
    assert not complaints


def test_an_answer_by_a_schema_is_a_record(page: Any, address: str, plain: SpeculativeLM) -> None:
    expect = playwright.expect
    page.goto(address)
    page.fill("#key", "right")
    page.press("#key", "Tab")
    expect(page.locator("#model option")).to_have_count(2)
    page.click("form summary")
    page.fill("#schema", "{")
    page.click("#run")
    expect(page.locator("#status.error")).to_contain_text("the schema is not JSON")
    fruit = {"enum": ["<b>apples</b>", "pens"]}
    schema = {
        "type": "object",
        "properties": {"\U0001f34e": fruit},
        "required": ["\U0001f34e"],
        "additionalProperties": False,
    }
    page.fill("#schema", json.dumps(schema))
    page.fill("#prompt", "how many")
    page.click("#run")
    expect(page.locator("#status")).to_have_text("Done.")

    asked = [{"role": "user", "content": "how many"}]
    wanted = plain.generate([asked], max_new_tokens=200, structured_outputs={"json": schema})[0]
    assert page.locator(".text").text_content() == wanted.text
    assert json.loads(page.locator(".record pre").text_content()) == json.loads(wanted.text)
    assert page.locator("[data-figure=record]").text_content() == "valid"
    assert int(page.locator("[data-figure=forced]").text_content()) == len(wanted.forced)
    forced = "".join(page.locator(".text .forced").all_text_contents())
    assert forced == plain.tokenizer.decode(
        [wanted.token_ids[place] for place in wanted.forced], skip_special_tokens=True
    )
    assert page.locator("#answers b").count() == 0

    page.fill("#tokens", "2")
    page.click("#run")
    expect(page.locator("[data-figure=record]")).to_have_text("cut short")
    expect(page.locator(".record")).to_be_hidden()


def test_stopping_and_errors_are_told(
    page: Any, address: str, drafted: SpeculativeLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = drafted.engine.step

    def slow_step() -> None:
        time.sleep(0.1)  # on a busy machine the browser takes longer to press a button than the model to answer
        step()

    expect = playwright.expect
    page.goto(address)
    page.fill("#key", "right")
    page.press("#key", "Tab")
    expect(page.locator("#model option")).to_have_count(2)
    page.fill("#prompt", "a" * 2000)
    page.click("#run")
    expect(page.locator("#status.error")).to_contain_text("prompt and output together")
    page.fill("#prompt", "how many")
    page.fill("#tokens", "250")
    with monkeypatch.context() as patch:
        patch.setattr(drafted.engine, "step", slow_step)
        page.click("#run")
        page.click("#stop")
        expect(page.locator("#status")).to_have_text("Stopped.")
        expect(page.locator("#run")).to_be_enabled()


def test_the_browser_may_do_no_more_than_the_page_needs(page: Any, address: str) -> None:
    response = page.goto(address)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
