"""New weights in a loaded model: from then on all is as if it had been loaded with them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from drafter import EngineConfig, EngineError, LoadError, Request, SamplingParams, SpeculativeLM
from drafter.drafters.contract import PlainDecoding
from drafter.drafters.registry import load_drafter
from drafter.engine.engine import Engine
from drafter.engine.engine_thread import _update
from drafter.requests import Generation
from drafter.target_model.model import BaseModel
from drafter.target_model.new_weights import match_weights
from tests.support.heads import make_head
from tests.support.images import example, processor_of, prompts_of
from tests.support.images import model_of as seeing_model
from tests.support.marks import pairwise
from tests.support.models import SpellingTokenizer, random_model, tokens_of
from tests.support.tapes import queue_steps

NODES = 6
BEGINNING = [3 + place * 7 % 90 for place in range(30)]
REQUESTS = [
    Request([*BEGINNING, 5 + row], SamplingParams(12, temperature=row % 2, seed=row, ignore_eos=True), str(row))
    for row in range(4)
]


@contextmanager
def loaded(model: Any, drafter: str, *, native: bool = True, kept_rows: int = 4) -> Iterator[SpeculativeLM]:
    base = BaseModel(model, native=native)
    kind = drafter.removeprefix("head ").removesuffix(", factored")
    if kind == drafter:
        made = load_drafter(drafter, base, NODES)
    else:
        sizes = {"joint_size": 8} if "factored" in drafter else {}
        made = make_head(base, kind, **sizes).drafter(base, NODES)
    settings = EngineConfig(4, 64, num_draft_tokens=NODES, kept_rows=kept_rows)
    with SpeculativeLM(base, made, SpellingTokenizer(), settings) as lm:
        yield lm


def ask(lm: SpeculativeLM) -> list[Generation]:
    return [handle.result(60) for handle in [lm.submit(request) for request in REQUESTS]]


def model_of(family: str, seed: int, *, tied: bool) -> Any:
    sizes = {} if family == "opt" else {"head_dim": 16}  # which the C++ decoder takes
    return random_model(family, seed, tie_word_embeddings=tied, max_position_embeddings=128, **sizes)


CASES = pairwise(
    5,
    ["none", "ngram", "memory", "head context 1", "head context 2, in part", "head eagle3, in part", "exit:1"],
    ["llama", "gemma2", "qwen3_moe", "opt"],
    [True, False],
    [True, False],
    [0, 4],
)


@pytest.mark.parametrize(("drafter", "family", "tied", "native", "kept_rows"), CASES)
def test_tokens_are_those_of_a_model_loaded_with_them(
    drafter: str, family: str, tied: bool, native: bool, kept_rows: int
) -> None:
    """Greedy and sampled, and drafts are as good: what was derived from the old weights is made again, too."""
    new = model_of(family, 1, tied=tied)
    with loaded(model_of(family, 1, tied=tied), drafter, native=native, kept_rows=kept_rows) as fresh:
        wanted, fingerprint = ask(fresh), fresh.base.fingerprint
    with loaded(model_of(family, 0, tied=tied), drafter, native=native, kept_rows=kept_rows) as lm:
        before, executor = ask(lm), lm.base.executor_name
        assert tokens_of(before) != tokens_of(wanted)
        assert executor == ("NativeDecoder" if native and family != "opt" else "ModelCode")
        assert lm.base.fingerprint != fingerprint
        assert lm.update_weights(new.named_parameters()) == 1
        found = ask(lm)
        assert tokens_of(found) == tokens_of(wanted)
        assert found[0].num_cached_tokens == 0
        # `memory` also drafts from texts of before, and weights of an EAGLE head begin as its target model's.
        if drafter not in ("memory", "head eagle3, in part"):
            assert [one.counts for one in found] == [one.counts for one in wanted]
        assert (lm.base.fingerprint, lm.base.executor_name) == (fingerprint, executor)
        assert {one.weights_version for one in before} == {0}
        assert {one.weights_version for one in found} == {1}
        again = ask(lm)
        assert all(one.num_cached_tokens > 0 for one in again) == bool(kept_rows)
        assert tokens_of(again) == tokens_of(wanted)


@pytest.mark.parametrize("drafter", ["none", "head context 1, factored", "head context 2, in part"])
def test_recorded_steps_have_the_new_weights(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA graphs have, which repeat operations on the tensors that they were recorded with."""
    recorder = queue_steps(monkeypatch)
    monkeypatch.setattr("drafter.target_model.prepacked._is_to_do", lambda layer: False)  # as nothing is on a GPU
    new = model_of("llama", 1, tied=True)
    with loaded(model_of("llama", 1, tied=True), drafter, kept_rows=0) as fresh:
        wanted = ask(fresh)
    with loaded(model_of("llama", 0, tied=True), drafter, kept_rows=0) as lm:
        before = [ask(lm) for _ in range(3)]
        recorded, repeated = recorder.recorded, recorder.repeated
        lm.update_weights(new.named_parameters())
        found = ask(lm)
        assert recorder.repeated > repeated > recorded > 0
    assert tokens_of(found) == tokens_of(wanted) != tokens_of(before[0])
    assert [one.counts for one in found] == [one.counts for one in wanted]


def test_weights_come_in_any_form() -> None:
    """A whole state_dict, names of tied weights or not, another dtype, an iterator; and back again."""
    old, new = (model_of("llama", seed, tied=True) for seed in (0, 1))
    half = {name: tensor.bfloat16() for name, tensor in new.state_dict().items()}
    assert "lm_head.weight" in half
    with loaded(model_of("llama", 0, tied=True), "none") as lm:
        first = tokens_of(ask(lm))
        assert lm.update_weights(new.state_dict()) == 1
        second = tokens_of(ask(lm))
        assert lm.update_weights((name, tensor) for name, tensor in half.items() if name != "lm_head.weight") == 2
        third = ask(lm)
        assert lm.update_weights(old.named_parameters()) == 3
        assert tokens_of(ask(lm)) == first != second
    for parameter in new.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with loaded(new, "none") as fresh:
        assert tokens_of(third) == tokens_of(ask(fresh))


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_a_checkpoints_own_names(family: str, tmp_path: Path) -> None:
    """Files may have each expert apart, and leave out a tied head."""
    new = model_of(family, 1, tied=True)
    new.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file, loaded(new, "none") as fresh:
        stored = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118 (it is no mapping)
        wanted = tokens_of(ask(fresh))
    assert ("experts.0" in str([name for name, _ in stored])) == (family == "qwen3_moe")
    with loaded(model_of(family, 0, tied=True), "none") as lm:
        lm.update_weights(iter(stored))
        assert tokens_of(ask(lm)) == wanted
        with pytest.raises(LoadError, match=r"the model has no model\.layers|there is no model\."):
            lm.update_weights(stored[:-1])


def renamed(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    return {how.format(name): tensor for name, tensor in state.items()}


def mistakes() -> dict[str, tuple[Any, str]]:
    """Weights that cannot be taken, and what is said about them."""
    state = model_of("llama", 1, tied=True).state_dict()
    head, norm = state["lm_head.weight"], "model.norm.weight"
    return {
        "missing": ({name: one for name, one in state.items() if name != norm}, f"there is no {norm}: give all"),
        "unknown": ({**state, "score.weight": head}, "has no score.weight: give weights of the same architecture"),
        "wrapped": (renamed(state, "module.{}"), r"names begin with 'module\.'"),
        "adapter": ({**state, "model.layers.0.lora_A.weight": head}, "merge the adapter"),
        "shape": (
            {**state, norm: state[norm][1:]},
            r"norm.weight has the shape \[31\], and the model's own has \[32\]",
        ),
        "not finite": ({**state, norm: state[norm] / 0}, "norm.weight has values that are not finite"),
        "integers": ({**state, norm: state[norm].long()}, "torch.int64 on cpu, which cannot replace torch.float32"),
        "no data": ({**state, norm: state[norm].to("meta")}, "on meta"),
        "untied": ({**state, "lm_head.weight": 2 * head}, "and the model ties them"),
        "twice": ([*state.items(), (norm, state[norm])], f"{norm} comes twice"),
        "no pairs": (list(state), "give a state_dict, or pairs"),
    }


@pytest.mark.parametrize("mistake", mistakes())
def test_a_mistake_changes_nothing(mistake: str) -> None:
    weights, said = mistakes()[mistake]
    model = model_of("llama", 0, tied=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with loaded(model, "none") as lm:
        with pytest.raises(LoadError, match=said):
            lm.update_weights(weights)
        assert lm.base.weights_version == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_untied_model_needs_its_head() -> None:
    with (
        loaded(model_of("llama", 0, tied=False), "none") as lm,
        pytest.raises(LoadError, match=r"there is no lm_head\.weight"),
    ):
        lm.update_weights(model_of("llama", 1, tied=True).named_parameters())


def test_requests_under_way_refuse_new_weights_until_they_have_ended() -> None:
    new = model_of("llama", 1, tied=True)
    with loaded(model_of("llama", 0, tied=True), "ngram") as lm:
        endless = lm.submit(Request([5], SamplingParams(50, ignore_eos=True)), stream=True)
        endless.park()
        with pytest.raises(EngineError, match="1 requests are under way"):
            lm.update_weights(new.named_parameters())
        endless.cancel()
        assert lm.update_weights(new.named_parameters()) == 1
        assert endless.result(60).finish_reason == "cancelled"
        assert ask(lm)[0].weights_version == 1
    with pytest.raises(EngineError, match="closed"):
        lm.update_weights(new.named_parameters())


def test_a_request_in_the_background_is_under_way_where_it_waits_for_others() -> None:
    base, new = BaseModel(model_of("llama", 0, tied=True)), model_of("llama", 1, tied=True)
    engine = Engine(base, PlainDecoding(), SpellingTokenizer(), EngineConfig(1, 64))
    pairs = match_weights("tiny", base.model, new.named_parameters())
    both = [engine.submit(Request([5], SamplingParams(50, ignore_eos=True), background=one)) for one in (False, True)]
    with pytest.raises(EngineError, match="2 requests are under way"):
        _update(engine, pairs)
    both[0].cancel()
    with pytest.raises(EngineError, match="1 requests are under way"):
        _update(engine, pairs)
    both[1].cancel()
    assert _update(engine, pairs) == 1


def test_weights_that_are_half_new_decode_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: BaseModel, weights: Any) -> None:
        raise MemoryError("no room")

    with loaded(model_of("llama", 0, tied=True), "none") as lm:
        monkeypatch.setattr(BaseModel, "update_weights", fail)
        with pytest.raises(MemoryError, match="no room"):
            lm.update_weights(model_of("llama", 1, tied=True).named_parameters())
        with pytest.raises(EngineError, match="no room"):
            ask(lm)


def test_a_model_with_new_weights_is_no_longer_made_by_its_arguments() -> None:
    """Unpickled, it would have the old ones."""
    with SpeculativeLM.from_pretrained(drafter="none", device="cpu") as lm:
        lm.update_weights(lm.base.model.state_dict())
        with pytest.raises(TypeError, match="with new weights"):
            pickle.dumps(lm)


def test_images_are_looked_at_again() -> None:
    """The vision tower has new weights, too, and what it made of images is kept between requests."""
    requests = [Request(prompt, SamplingParams(8, ignore_eos=True)) for prompt in prompts_of("llava")]
    settings, found = EngineConfig(4, 256), []
    for seeds in ((1,), (0, 1)):
        base = seeing(seeds[0])
        with SpeculativeLM(base, PlainDecoding(), SpellingTokenizer(), settings) as lm:
            for seed in seeds:
                if seed != seeds[0]:
                    lm.update_weights(seeing_model("llava", seed).named_parameters())
                found.append(tokens_of(handle.result(60) for handle in [lm.submit(one) for one in requests]))
    assert found[0] == found[2] != found[1]


def seeing(seed: int) -> BaseModel:
    return BaseModel(seeing_model("llava", seed), example=example(processor_of("llava")))
