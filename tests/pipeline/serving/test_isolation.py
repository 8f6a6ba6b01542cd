"""No client's answer is drafted from another client's, unless the operator says so."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from drafter import EngineConfig, SpeculativeLM
from drafter.engine.config import EngineSettings
from pipeline.cluster.ray_cluster import ActorResources
from pipeline.engines.models import EngineSpec
from pipeline.serving.application import _engines
from pipeline.serving.config import ApplicationConfig
from pipeline.serving.keys import Keys
from pipeline.serving.replica import Answers
from tests.pipeline.serving.conftest import NAME
from tests.support.local_endpoint import served
from tests.support.marks import slow_but
from tests.support.waiting import PATIENCE


def answers(model: Path, drafter: str, *, isolated: bool) -> list[dict[str, Any]]:
    """How two clients' answers to the same question were drafted, one after the other, and what they were."""
    config = EngineConfig(max_num_seqs=2, num_draft_tokens=8)
    with (
        SpeculativeLM.from_pretrained(model, drafter, config=config, isolated=isolated) as lm,
        served({NAME: Answers(lm, "replica", seconds=PATIENCE)}) as address,
    ):
        found = []
        for key in ("sk-one", "sk-two"):
            client = OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=PATIENCE)
            asked = [{"role": "user", "content": "how many apples and pens does she have"}]
            answer = client.chat.completions.create(
                model=NAME,
                messages=asked,  # type: ignore[arg-type]
                temperature=0,
                max_tokens=40,
                extra_body={"speculation": True},
            )
            (statistics,) = answer.model_extra["speculation"]  # type: ignore[index]
            counts = {name: value for name, value in statistics.items() if not name.startswith("seconds")}
            found.append({"content": answer.choices[0].message.content, **counts})
    return found


DRAFTERS = ["memory", "cacheback", "memory+cacheback+ngram"]


@pytest.mark.parametrize("drafter", slow_but(DRAFTERS[2:], DRAFTERS))
def test_what_others_were_answered_shows_in_nothing(drafter: str, model: Path) -> None:
    first, second = answers(model, drafter, isolated=True)
    assert second == first
    first, second = answers(model, drafter, isolated=False)
    assert second["content"] == first["content"]
    assert second["num_decode_steps"] < first["num_decode_steps"]


@pytest.mark.parametrize(("keys", "shared"), [(("one", "one"), True), (("one", "two"), False), ((), True)])
def test_prefixes_are_shared_within_one_key(keys: tuple[str, ...], shared: bool, model: Path) -> None:
    """One client's answer streams while the other one asks the same; without keys all are one."""
    known = Keys(tuple(hashlib.sha256(key.encode()).digest() for key in keys))
    config = EngineConfig(max_num_seqs=2, num_draft_tokens=0)
    asked: dict[str, Any] = {"model": NAME, "prompt": "how many apples and pens " * 4, "temperature": 0}
    with (
        SpeculativeLM.from_pretrained(model, "none", config=config) as lm,
        served({NAME: Answers(lm, "replica", seconds=PATIENCE)}, known) as address,
    ):
        first, second = (
            OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=PATIENCE)
            for key in keys or ("any", "other")
        )
        stream = first.completions.create(**asked, stream=True, max_tokens=200, extra_body={"ignore_eos": True})
        next(iter(stream))
        answer = second.completions.create(**asked, max_tokens=1)
        state = lm.engine.state()
        stream.close()
    read = answer.usage.prompt_tokens - 1
    assert (state.shared_tokens, state.prefilled_tokens) == ((read, read) if shared else (0, 2 * read))
    assert answer.usage.prompt_tokens_details.cached_tokens == (read if shared else 0)


@pytest.mark.parametrize(("given", "isolated"), [({}, True), ({"isolation": False}, False)])
def test_replicas_are_isolated_unless_the_operator_says_otherwise(given: dict[str, Any], isolated: bool) -> None:
    config = ApplicationConfig(drafter="memory", engine=EngineSettings(max_num_seqs=2), **given)
    application = _engines(config, config.drafter, "Engine", ActorResources(1.0, 0.0, 1, 1))
    (spec, *_) = application._bound_deployment.init_args
    assert isinstance(spec, EngineSpec)
    assert spec.isolated is isolated
