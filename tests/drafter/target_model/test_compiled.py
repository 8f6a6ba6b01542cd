from __future__ import annotations

import itertools
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from drafter.drafters.contract import Ask, PlainDecoding
from drafter.errors import LoadError
from drafter.requests import Request, SamplingParams
from drafter.target_model.attention import masked_prefix_attention
from drafter.target_model.model import BaseModel
from tests.support.models import (
    AdversarialDrafter,
    decode,
    engine_of,
    finish,
    random_model,
    random_prompts,
    run_engine,
    tokens_of,
)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.measuring  # which compiles for the sizes that it times
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
    plain = run_engine(base, PlainDecoding(), requests, max_num_seqs=3, max_model_len=64)
    engine = engine_of(base, AdversarialDrafter(0, nodes=8), max_num_seqs=3, max_model_len=64, compile=True)
    sizes = itertools.cycle([0, 3, 4, 7, 8])
    engine.budget.plan = lambda rows: Ask(next(sizes))  # type: ignore[method-assign]
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = decode(engine, requests)
    assert tokens_of(found) == tokens_of(plain)
    assert engine.state().draft_tokens > 0


@pytest.mark.slow
@pytest.mark.long
def test_an_engine_in_half_precision_starts_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where committed positions are read apart, as on a GPU, and a cache in blocks keeps them from it."""
    torch._dynamo.reset()
    monkeypatch.setattr("drafter.target_model.model.prefix_attention_on", lambda device, dtype: masked_prefix_attention)
    monkeypatch.setattr("drafter.target_model.forward.torch.compile", partial(torch.compile, backend="aot_eager"))
    model = random_model("llama").bfloat16()
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    base = BaseModel(model)
    assert base.allow_packing()
    assert base.reads_to_length
    memory = 2 * base.new_cache(1, 96).nbytes / 2**30
    engine = engine_of(
        base, AdversarialDrafter(0, nodes=8), max_num_seqs=3, max_model_len=64, compile=True, kv_gib=memory
    )
    handles = [engine.submit(Request(prompt * 3, SamplingParams(9))) for prompt in random_prompts(4)]
    finish(engine)
    assert all(0 < len(handle.result(0).token_ids) <= 9 for handle in handles)
    torch._dynamo.reset()


@pytest.mark.parametrize("fault", [RuntimeError("no compiler here"), NameError("name 's34' is not defined")])
def test_what_fails_outside_of_the_compilers_own_errors_is_a_load_error(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def verify(*_: object) -> None:
        raise fault

    monkeypatch.setitem(
        vars(tiny_base), "compile", lambda: setattr(tiny_base, "_executor", SimpleNamespace(forward=verify))
    )
    monkeypatch.setattr(tiny_base, "_executor", tiny_base._executor)
    with pytest.raises(LoadError, match=rf"cannot be compiled here: \w+Error: {fault} \(leave compile out\)"):
        engine_of(tiny_base, PlainDecoding(), max_num_seqs=1, compile=True)


def test_a_compiler_that_fails_is_a_load_error(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no compiler here")

    compiled = torch.compile(lambda x: x + 1, backend=broken)
    monkeypatch.setattr(
        tiny_base,
        "compile",
        lambda: setattr(tiny_base, "_executor", SimpleNamespace(forward=lambda *_: compiled(torch.ones(1)))),
    )
    monkeypatch.setattr(tiny_base, "_executor", tiny_base._executor)
    with pytest.raises(LoadError, match="no compiler here"):
        engine_of(tiny_base, PlainDecoding(), max_num_seqs=1, compile=True)
