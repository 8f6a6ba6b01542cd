"""An endpoint whose head learns: the tokens are those of plain decoding, whoever is killed, and of who did not agree
nothing is learnt. At last its cluster is lost."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from openai import OpenAI

from drafter import SamplingParams, SpeculativeLM
from drafter.heads.checkpoint import load_head
from drafter.methods.learning.drafter import version_of
from drafter.target_model.loading import load_base
from tests.pipeline.serving.conftest import KEY, NAME, Endpoint, started
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow
OTHER = "sk-of-who-did-not-agree"
LEARNING: dict[str, Any] = {
    "learning": "true",
    "learning.head": "new",
    "learning.share": 1,
}
QUICK = "tests.support.quick_learner"


class Client:
    """Asks one question after another, and compares each answer with plain decoding's.

    Args:
        endpoint: Who is asked.
        plain: The model without a drafter.
    """

    def __init__(self, endpoint: Endpoint, plain: SpeculativeLM) -> None:
        self._address, self._plain = endpoint.address, plain
        self._numbers = count()
        self.compared: set[float] = set()

    def ask(self, key: str) -> None:
        """Ask greedily and at a temperature."""
        number = next(self._numbers)
        messages: Any = [{"role": "user", "content": f"how many {'apples and pens ' * (number % 3)}{number}"}]
        api = OpenAI(base_url=f"{self._address}/v1", api_key=key, max_retries=0, timeout=PATIENCE)
        for temperature in (0.0, 0.8):
            settings: dict[str, Any] = {"temperature": temperature, "seed": number}
            answer = api.chat.completions.create(model=NAME, messages=messages, max_tokens=40, **settings)
            (wanted,) = self._plain.generate(messages, SamplingParams(max_new_tokens=40, **settings))
            assert answer.choices[0].message.content == wanted.text
            self.compared.add(temperature)

    def state(self) -> dict[str, Any]:
        """What the learner does."""
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx2.get(f"{self._address}/learning", headers=headers, timeout=PATIENCE)
        return answer.json() if answer.status_code == 200 else {"state": "starting", "version": None}


def process(endpoint: Endpoint, name: str) -> psutil.Process | None:
    """The endpoint's process of this name; None while there is none."""
    for one in endpoint.started():
        with suppress(psutil.NoSuchProcess):
            if name in "".join(one.cmdline()[:1]).rpartition("/")[2]:
                return one
    return None


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    agreed = tmp_path / "agreed.txt"
    agreed.write_text(f"{KEY}\n", encoding="utf-8")
    return {**LEARNING, "learning.agreed": agreed, "learning.folder": tmp_path / "learnt"}


@pytest.mark.long
def test_tokens_are_those_of_plain_decoding_and_only_who_agreed_is_learnt_from(
    model: Path, plain: SpeculativeLM, tmp_path: Path, settings: dict[str, Any]
) -> None:
    learnt = tmp_path / "learnt"

    def saved() -> int:
        return version_of(load_head(learnt / "head", load_base(model)))

    with started(model, tmp_path, (KEY, OTHER), settings, QUICK) as endpoint:
        client = Client(endpoint, plain)
        wait_until(lambda: client.state()["state"] == "learning", "the learner", pause=1)

        for _ in range(4):
            client.ask(OTHER)
        client.ask(KEY)  # two rows of one prompt, which as the first one is held out
        wait_until(lambda: client.state()["held_out"] >= 2, "these rows")
        state = client.state()
        assert (state["rows"], state["held_out"], state["dropped"], state["steps"]) == (0, 2, 0, 0)
        assert state["version"] is None

        def drafts_with(number: int) -> bool:
            client.ask(KEY)
            return endpoint.figures().get("drafter_version", 0.0) >= number

        wait_until(lambda: drafts_with(2), "two versions in a replica")
        # What keeps the learner ends, and the learner with it. A job's test kills the learner alone.
        victim = wait_until(partial(process, endpoint, ":Learner"), "the learner's keeper")
        os.kill(victim.pid, signal.SIGKILL)
        last = saved()
        # The one that was being written may be out already.
        wait_until(partial(drafts_with, last + 2), "a version after the learner's keeper was killed")
        assert client.compared == {0.0, 0.8}

        def is_known() -> bool:
            return bool(endpoint.figures().get("drafter_learner_version", 0.0) >= last + 2)

        wait_until(is_known, "the newest version to be told")
        assert httpx2.get(f"{endpoint.address}/learning", timeout=PATIENCE).status_code == 401
        log = endpoint.log.read_text(encoding="utf-8")
        assert "a head learns from the requests of clients whose keys are in " in log

    last = saved()
    # A learner that was killed while it wrote leaves a piece, which the next one removes.
    whole = {path.name for path in learnt.iterdir() if path.suffix != ".partial"}
    assert whole == {"head", "_learner.safetensors"}

    with started(model, tmp_path, (KEY, OTHER), settings, QUICK) as endpoint:
        client = Client(endpoint, plain)
        client.ask(OTHER)
        figures = endpoint.wait_until_idle(replicas=1)
        assert figures["drafter_version"] >= last  # it goes on with the head that was learnt

        # Its cluster is lost: it ends, and says why.
        for victim in [process(endpoint, name) for name in ("raylet", ":Engine")]:
            assert victim is not None
            with suppress(psutil.NoSuchProcess):  # an engine ends with its raylet
                victim.kill()
        assert endpoint.process.wait(PATIENCE) == 1
        log = endpoint.log.read_text(encoding="utf-8")
    assert "error: Ray's process on this machine (the raylet) has ended: start again\n" in log
