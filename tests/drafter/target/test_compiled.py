""""""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from drafter.drafters.contract import PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.requests import Request, SamplingParams
from drafter.target.model import BaseModel
from tests.support.models import SpellingTokenizer, random_model, random_prompts, run_engine


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler")
def test_a_compiled_engine_says_the_same_and_compiles_nothing_after_its_start() -> None:
    """Greedy and sampled, one row and several, plain steps and trees of every size."""
    model = random_model("llama").bfloat16().float()  # as checkpoints come, whose weights are read as fp16
    # Compilers need their time for each layer.
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    base = BaseModel(model)
    requests = [
        Request(prompt * 3, SamplingParams(max_new_tokens=9 + i, temperature=0.7 * (i % 2), seed=i), str(i))
        for i, prompt in enumerate(random_prompts(7))
    ]
    plain = run_engine(base, PlainDecoding(), requests, slots=3, max_length=64)
    engine = Engine(base, NgramDrafter(8), SpellingTokenizer(), EngineConfig(slots=3, max_length=64, compile=True))
    with torch._dynamo.config.patch(error_on_recompile=True):
        handles = [engine.submit(request) for request in requests]
        while not engine.idle:
            engine.step()
    assert [handle.result(0).token_ids for handle in handles] == [one.token_ids for one in plain]
    assert engine.state().draft_tokens > 0


def test_a_compiler_that_fails_is_a_load_error(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no compiler here")

    compiled = torch.compile(lambda x: x + 1, backend=broken)
    monkeypatch.setattr(
        tiny_base,
        "compile",
        lambda: setattr(tiny_base, "_executor", SimpleNamespace(verify=lambda *_: compiled(torch.ones(1)))),
    )
    monkeypatch.setattr(tiny_base, "_executor", tiny_base._executor)
    with pytest.raises(LoadError, match="no compiler here"):
        Engine(tiny_base, PlainDecoding(), SpellingTokenizer(), EngineConfig(slots=1, compile=True))
