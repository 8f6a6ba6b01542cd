"""Several processes that each have a part of a model decode what one does, and end together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from transformers import AutoConfig

from drafter import EngineError, LoadError, Request, SamplingParams, SpeculativeLM
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.engine.config import engine_config
from drafter.engine.engine import Engine
from drafter.images.loading import Eyes
from drafter.ranks.leader import load_on_ranks
from drafter.target_model.cache import BLOCK, SPARE
from drafter.target_model.model import BaseModel
from tests.drafter.test_identity import MAKE
from tests.support.identity import SITUATIONS, config_of, longest_of, requests_of, target_of
from tests.support.images import FAMILIES as SEEING
from tests.support.images import processor_of
from tests.support.models import engine_of, finish, plainly, texts_of, tokens_of

PRICE = {"json": {"type": "object", "properties": {"price": {"type": "integer"}}, "required": ["price"]}}
ASKED: dict[str, dict[str, Any]] = {
    "Tom has 3 boxes of 12 pens. How many": {},
    "Once upon a time": {"temperature": 1.0, "seed": 5},
    "2 + 2 =": {"temperature": 0.8, "top_p": 0.9, "seed": 2, "frequency_penalty": 0.5},
    "Tom has 3 boxes of 12 pens. He": {"logprobs": 2, "ignore_eos": True},
    "A pen for 5 dollars:": {"structured_outputs": PRICE},
}
SPLIT = ("llama", "gemma2", "phi3", "qwen3_moe", "llama4_text", "granitemoehybrid", "llava", "paligemma-2")


@contextmanager
def on_ranks(model: Path, size: int = 2) -> Iterator[BaseModel]:
    """A model in several processes, without an engine."""
    base = load_on_ranks(size, model, device="cpu", trust_remote_code=False, eyes=Eyes(), on_stage=lambda stage: None)
    try:
        yield base
    finally:
        base.others.close()


def end_rank_1(base: BaseModel) -> None:
    os.kill(base.others._ranks[0].process.pid, signal.SIGKILL)


def test_two_processes_decode_as_one_and_end_together() -> None:
    with SpeculativeLM.from_pretrained(None, "none", device="cpu", max_model_len=256) as whole:
        requests = [Request(whole.encode(one), SamplingParams(24, **how)) for one, how in ASKED.items()]
        expected = [handle.result() for handle in map(whole.submit, requests)]
    settings: dict[str, Any] = {"num_draft_tokens": 6, "max_num_seqs": 3, "max_model_len": 256}
    with SpeculativeLM.from_pretrained(None, "ctc", device="cpu", tensor_parallel_size=2, **settings) as lm:
        base, blocks = lm.base, 6 + SPARE
        assert base.fingerprint == whole.base.fingerprint
        assert 2 * base.cache_bytes.position == whole.base.cache_bytes.position
        found = [handle.result() for handle in map(lm.submit, requests)]
        assert tokens_of(found) == tokens_of(expected)
        assert sum(one.counts.num_accepted_draft_tokens for one in found) > 0
        # Another drafter, memory that does not reach for all rows, and rows that go before their end.
        settings |= {"kv_gib": base.cache_bytes.position * BLOCK * blocks / 2**30, "max_model_len": 96}
        exiting = Engine(base, FirstLayersDrafter(base, 2, 6), lm.tokenizer, engine_config(None, settings))
        handles = [exiting.submit(request) for request in (*requests, *requests)]
        exiting.step()
        for handle in handles[: len(requests)]:
            handle.cancel()
        assert tokens_of(finish(exiting, handles)[len(requests) :]) == tokens_of(expected)
        with pytest.raises(LoadError, match="it is split among processes: load the model without tensor_parallel_size"):
            lm.update_weights(whole.base.model.named_parameters())
        long = [lm.submit(Request([5, 6], SamplingParams(250, ignore_eos=True))) for _ in range(4)]
        end_rank_1(base)
        for handle in long:
            with pytest.raises(EngineError, match="rank 1 of the 2 of the model has ended: it was ended by signal 9"):
                handle.result(60)
        with pytest.raises(EngineError, match="rank 1 of the 2"):
            lm.submit(requests[0])
    assert not distributed.is_initialized()


@pytest.mark.slow
def test_an_engine_without_work_ends_with_a_rank_and_another_begins() -> None:
    for _ in range(2):
        with SpeculativeLM.from_pretrained(None, "none", device="cpu", tensor_parallel_size=2, max_num_seqs=1) as lm:
            (answer,) = lm.generate("2 + 2 =", max_new_tokens=4)
            assert answer.token_ids
            with pytest.raises(LoadError, match="for itself, and this process uses it already"):
                SpeculativeLM.from_pretrained(None, "none", device="cpu", tensor_parallel_size=2)
            end_rank_1(lm.base)
            lm._thread._thread.join(60)
            with pytest.raises(EngineError, match="ended by signal 9"):
                lm.generate("2 + 2 =", max_new_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "family"), [*enumerate(SPLIT)])
def test_families_are_split(place: int, family: str, tmp_path: Path) -> None:
    """Two drafters a family, each in a situation of its own. All in all situations: test_leader, in one process."""
    whole, requests = target_of(family), requests_of(family)
    whole.model.save_pretrained(tmp_path)
    if family in SEEING:
        processor_of(family).processor.save_pretrained(tmp_path)
    expected = plainly(whole, requests, max_model_len=longest_of(family))
    cases = [*zip(MAKE, (*SITUATIONS, "a batch"), strict=True)]
    with on_ranks(tmp_path) as base:
        assert (base.sight is not None) == (family in SEEING), base.blind
        for drafter, situation in (cases * 2)[place * 2 % len(cases) :][:2]:
            made = MAKE[drafter](base, texts_of(requests, expected))
            engine = engine_of(base, made, **config_of(family, made, situation, 3))
            assert tokens_of(SITUATIONS[situation](engine, requests)) == tokens_of(expected), (drafter, situation)


@pytest.mark.parametrize(
    ("family", "changes", "size", "message"),
    [
        ("llama", {}, 3, "its num_attention_heads 4 is no multiple of tensor_parallel_size 3"),
        ("llama", {}, 4, "its num_key_value_heads 2 is no multiple of tensor_parallel_size 4"),
        ("qwen3_5_text", {}, 2, "transformers would split the recurrent layers of qwen3_5_text"),
        ("gpt2", {}, 2, "transformers has no plan by which to split gpt2: leave tensor_parallel_size 2 out"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, 2, "weights, which are not split"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_a_process_starts(
    family: str, changes: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    config = target_of(family).model.config.to_dict() | changes
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=message):
        SpeculativeLM.from_pretrained(tmp_path, "none", device="cpu", tensor_parallel_size=size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter": "folder"}, "adapter and tensor_parallel_size 2 do not go together"),
        ({"device_map": "auto"}, "device_map and tensor_parallel_size 2 do not go together"),
        ({"dequantize": True}, "dequantize and tensor_parallel_size 2 do not go together"),
        ({"compile": True}, "compile and tensor_parallel_size do not go together"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, not 0"),
    ],
)
def test_a_setting_that_does_not_go_with_ranks_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        SpeculativeLM.from_pretrained(None, "none", **{"device": "cpu", "tensor_parallel_size": 2, **settings})
