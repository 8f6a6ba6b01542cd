"""A prompt with images is read as the model itself reads it, and continued token for token as `generate` does."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.handle import Handle
from drafter.engine.memory import plan_memory
from drafter.errors import RequestError
from drafter.prompt import Prompt
from drafter.requests import Request, SamplingParams
from drafter.target_model.architecture import small_copy
from drafter.target_model.model import BaseModel
from drafter.target_model.sight import KEPT_BYTES, Borders, Sight
from tests.support.images import CONFIGS, FAMILIES, asked, base_of, picture, processor_of, prompts_of, seeing_base
from tests.support.marks import slow_but
from tests.support.models import (
    DEVICE,
    AdversarialDrafter,
    OracleDrafter,
    decode,
    engine_of,
    finish,
    run_engine,
    tokens_of,
)

NEW = 12
QUICK = ["llava", "qwen3_vl", "gemma3", "paligemma"]


def reference(model: Any, prompt: Prompt) -> list[int]:
    inputs = {name: torch.from_numpy(value).to(DEVICE) for name, value in prompt.inputs.items()}
    ids = torch.tensor([list(prompt.ids)], device=DEVICE)
    made = model.generate(input_ids=ids, **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return made[0, len(prompt.ids) :].tolist()  # type: ignore[no-any-return]


@cache
def expected(family: str) -> list[list[int]]:
    return [reference(seeing_base(family).model, prompt) for prompt in prompts_of(family)]


def requests(family: str, **sampling: Any) -> list[Request]:
    settings = SamplingParams(NEW, ignore_eos=True, **sampling)
    return [Request(prompt, settings) for prompt in prompts_of(family)]


def tokens(family: str, drafter: Drafter, asked: list[Request] | None = None, **config: Any) -> list[list[int]]:
    settings = {"max_num_seqs": 4, "num_draft_tokens": 7} | config
    return tokens_of(run_engine(seeing_base(family), drafter, asked or requests(family), **settings))


def oracle(family: str) -> OracleDrafter:
    return OracleDrafter([[*one.ids, *text] for one, text in zip(prompts_of(family), expected(family), strict=True)])


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_rows_with_images_are_continued_as_generate_does(family: str) -> None:
    assert seeing_base(family).sight is not None, seeing_base(family).blind
    assert expected(family)[0] != expected(family)[1]  # or the images do not matter
    for drafter in (PlainDecoding(), oracle(family), AdversarialDrafter(0)):
        assert tokens(family, drafter) == expected(family), type(drafter)


@pytest.mark.parametrize("family", slow_but(["qwen3_vl", "gemma3"], [*QUICK, "paligemma-2", "qwen2_vl"]))
def test_a_prompt_is_cut_where_its_tokens_do_not_see_each_other(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 5)
    assert tokens(family, oracle(family)) == expected(family)


def test_rows_with_images_that_have_ended_are_continued_from() -> None:
    family = "qwen3_vl"  # whose prompts may be cut anywhere
    engine = engine_of(seeing_base(family), oracle(family), max_num_seqs=4, num_draft_tokens=7)
    for _ in range(2):
        found = decode(engine, requests(family))
        assert tokens_of(found) == expected(family)
    assert [one.num_cached_tokens for one in found] == [len(prompt.ids) - 1 for prompt in prompts_of(family)]


@pytest.mark.parametrize("family", slow_but(["paligemma-2"], ["paligemma-2", "llava", "qwen2_vl", "gemma4"]))
def test_log_probabilities_of_a_prompt_are_the_models_own(family: str) -> None:
    prompt = prompts_of(family)[3]  # longer than the window, where there is one
    request = Request(prompt, SamplingParams(NEW, ignore_eos=True, logprobs=0), prompt_logprobs=0)
    (found,) = run_engine(seeing_base(family), oracle(family), [request], max_num_seqs=1, num_draft_tokens=7)
    assert found.token_ids == expected(family)[3]
    inputs = {name: torch.from_numpy(value).to(DEVICE) for name, value in prompt.inputs.items()}
    ids = torch.tensor([list(prompt.ids)], device=DEVICE)
    with torch.inference_mode():
        own = seeing_base(family).model(input_ids=ids, **inputs).logits[0].log_softmax(-1)
    following = torch.cat([ids[0, 1:], torch.tensor(found.token_ids[:1], device=DEVICE)])
    theirs = own.gather(1, following[:, None])[:, 0]
    assert found.prompt_logprobs is not None
    assert found.logprobs is not None
    ours = torch.tensor([one.logprob for one in [*found.prompt_logprobs[1:], found.logprobs[0]]])
    torch.testing.assert_close(ours, theirs.cpu(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {"sliding_window": 64}),
        ("qwen2_vl", {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_windows_are_proved_on_a_small_copy(family: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIGS[family], "text_config": {**CONFIGS[family]["text_config"], **settings}}
    monkeypatch.setitem(CONFIGS, family, config)
    copies: list[Any] = []

    def copied(*given: Any) -> Any:
        copies.append(small_copy(*given))
        return copies[-1]

    monkeypatch.setattr("drafter.target_model.model.small_copy", copied)
    assert base_of(family).sight is not None
    assert len(copies) == 1


def test_trees_and_texts_run_natively_after_images() -> None:
    if DEVICE.type == "cpu":
        assert seeing_base("smolvlm").executor_name == "NativeDecoder"
    assert tokens("smolvlm", oracle("smolvlm")) == expected("smolvlm")


@pytest.mark.parametrize(
    "family", slow_but(["llava", "qwen3_vl"], [*QUICK, "idefics3", "internvl", "gemma4", "mistral3"])
)
def test_images_are_looked_at_in_pieces_while_others_go_on(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeing, rows = seeing_base(family), requests(family)
    assert seeing.sight is not None
    monkeypatch.setattr("drafter.target_model.towers._PIXELS", 1)  # two tiles at a time
    monkeypatch.setattr(seeing.sight._towers, "_text_size", 0)  # and a rest before each layer
    seeing.sight.forget()
    engine = engine_of(seeing, PlainDecoding(), max_num_seqs=4)
    text = engine.submit(Request(rows[2].prompt, SamplingParams(150, ignore_eos=True)), stream=True)
    while not engine.state().output_tokens:
        engine.step()

    def looked_at(handle: Handle) -> int:
        """The pieces until a request's images have been looked at, each with a token of the text beside it."""
        pieces = 0
        while handle.request.prompt not in [one.handle.request.prompt for one in engine.scheduler.active]:
            before = engine.state().output_tokens
            engine.step()
            assert engine.state().output_tokens > before
            pieces += 1
        return pieces

    handles = [engine.submit(rows[number]) for number in (3, 4)]
    assert all(looked_at(handle) > 1 for handle in handles)  # the two layers of each tower
    gone = engine.submit(rows[0])
    while not [one for one in threading.enumerate() if one.name == "in-pieces"]:
        engine.step()
    gone.cancel()
    engine.step()
    assert not [one for one in threading.enumerate() if one.name == "in-pieces"]
    last = engine.submit(rows[5])
    assert tokens_of(finish(engine, (*handles, last))) == [expected(family)[one] for one in (3, 4, 5)]
    assert len(text.result(0).token_ids) == 150


def test_rows_share_what_their_images_have_in_common() -> None:
    family = "llava"
    encode, image = processor_of(family).encode, picture(1)
    rows = [encode(asked(f"And question {number}?"), [picture(1 if number < 3 else 2)]) for number in range(4)]
    engine = engine_of(seeing_base(family), PlainDecoding(), max_num_seqs=4)
    tower, calls = seeing_base(family).model.model.vision_tower, []
    hook = tower.register_forward_hook(lambda *call: calls.append(1))
    before = encode(asked("Is this another one?"), [image])  # whatever was kept of other tests
    seeing_base(family).sight.forget()  # type: ignore[union-attr]
    handles = []
    for prompt in rows:
        handles.append(engine.submit(Request(prompt, SamplingParams(NEW, ignore_eos=True))))
        engine.step()
    hook.remove()
    assert len(calls) == 2  # two images
    text = len(before.ids) - len("Is this another one?")  # all of a prompt but the question
    behind = len("<|turn|>user:")
    assert text > behind
    question = len("And question ") + rows[0].spans[0].stop
    start = rows[0].spans[0].start
    assert engine.state().shared_tokens == 2 * question + (start if start >= 8 else 0)
    found = tokens_of(finish(engine, handles))
    assert found == [reference(seeing_base(family).model, prompt) for prompt in rows]


def test_an_image_at_another_size_is_encoded_again() -> None:
    usual, large = processor_of("qwen3_vl"), processor_of("qwen3_vl")
    large.processor.image_processor.size = {"shortest_edge": 64 * 64, "longest_edge": 64 * 64}
    few, many = (one.encode(asked("What?"), [picture(1)]) for one in (usual, large))
    assert len(few.ids) < len(many.ids)
    sizes = [seeing_base("qwen3_vl").sight.features(prompt).size for prompt in (few, many)]  # type: ignore[union-attr]
    assert sizes == [len(few.ids), len(many.ids)]


def test_prompts_that_cannot_be_read_end_alone() -> None:
    family = "llava"
    good = prompts_of(family)[0]
    short = replace(good, ids=[one for place, one in enumerate(good.ids) if place != good.spans[0].start])
    short = replace(short, spans=(replace(good.spans[0], stop=good.spans[0].stop - 1),))
    found = run_engine_with_errors(family, [short, good])
    assert isinstance(found[0], RequestError)
    assert "cannot read these images" in str(found[0])
    assert found[1] == expected(family)[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: replace(one, ids=one.ids[: one.spans[0].stop]), "ends with an image"),
        (lambda one: replace(one, ids=[*one.ids, one.ids[one.spans[0].start], 40]), "which stands for images"),
        (lambda one: replace(one, inputs={**one.inputs, "pixels": np.zeros(1)}), "takes no pixels"),
        (lambda one: replace(one, inputs={}), "without their inputs"),
        (lambda one: Prompt(one.ids), "which stands for images"),
        (lambda one: replace(one, inputs={**one.inputs, "pixel_values_videos": np.zeros(1)}), "pixel_values_videos"),
        (lambda one: Prompt([40, 41, 42], inputs={"pixel_values_videos": np.zeros(1)}), "pixel_values_videos"),
        (lambda one: Prompt([40, 41, 42], inputs=one.inputs), "pixel_values, and no span"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(change: Any, reason: str) -> None:
    family = "llava_onevision"  # whose forward takes videos, too
    engine = engine_of(seeing_base(family), PlainDecoding(), max_num_seqs=1)
    with pytest.raises(RequestError, match=reason):
        engine.submit(Request(change(prompts_of(family)[0])))


@pytest.mark.parametrize("family", slow_but(["llava"], ["llava", "paligemma"]))
def test_inputs_of_equal_digests_are_not_taken_for_each_other(family: str) -> None:
    """Prompts of anybody's: one digest for all images, which are of one size."""
    made = [processor_of(family).encode(asked("What is this?"), [picture(seed)]) for seed in (1, 2, 1)]
    rows = [Prompt(one.ids, tuple(replace(span, digest=b"") for span in one.spans), one.inputs) for one in made]
    assert made[0].ids == made[1].ids
    engine = engine_of(seeing_base(family), PlainDecoding(), max_num_seqs=3)
    handles = []
    for row in rows:
        handles.append(engine.submit(Request(row, SamplingParams(NEW, ignore_eos=True))))
        engine.step()
    assert tokens_of(finish(engine, handles)) == [reference(seeing_base(family).model, one) for one in made]
    assert engine.state().shared_tokens == (len(rows[2].ids) - 1 if family != "paligemma" else 0)


def test_images_are_kept_for_their_own_salt() -> None:
    """How long a prompt takes does not tell one salt what another has sent."""
    prompt = processor_of("llava").encode(asked("What is this?"), [picture(7)])
    engine = engine_of(seeing_base("llava"), PlainDecoding(), max_num_seqs=1)
    calls: list[int] = []
    hook = seeing_base("llava").model.model.vision_tower.register_forward_hook(lambda *call: calls.append(1))
    counts = []
    for salt in ("one", "two", "one", "two", ""):
        engine.submit(Request(prompt, SamplingParams(1), salt=salt))
        finish(engine)
        counts.append(len(calls))
    hook.remove()
    assert counts == [1, 2, 2, 2, 3]


def test_a_model_of_text_refuses_images(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=1)
    with pytest.raises(RequestError, match=r"has images, and .* reads text alone"):
        engine.submit(Request(replace(prompts_of("llava")[0], ids=[3] * len(prompts_of("llava")[0].ids))))


def test_a_model_that_reads_images_otherwise_reads_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Sight.features
    monkeypatch.setattr(Sight, "features", lambda sight, *given: replace(own(sight, *given), shift=5))
    blind = base_of("qwen2_vl")
    assert blind.sight is None
    engine = engine_of(blind, PlainDecoding(), max_num_seqs=1)
    with pytest.raises(RequestError, match="gives other logits after an image"):
        engine.submit(Request(prompts_of("qwen2_vl")[0]))


def test_borders_are_where_no_token_sees_one_behind() -> None:
    borders = Borders(np.array([0, 1, 4, 4, 4, 5, 8, 8, 8]))  # two blocks of three
    assert [place for place in range(10) if borders.before(place) == place] == [0, 1, 2, 5, 6, 9]
    assert (borders.before(4), borders.behind(3), borders.before(8), borders.behind(7)) == (2, 5, 6, 9)
    assert (borders.cut(0, 4), borders.cut(2, 4), borders.cut(5, 9), borders.cut(6, 7)) == (2, 5, 9, 9)
    assert borders.before(12) == borders.behind(12) == 12  # behind the prompt everywhere


def test_tokens_see_in_each_kind_of_layer_what_the_model_lets_them_see() -> None:
    """A block of three in a window of two; where all of a kind's tokens see those before them, nothing is said."""
    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 0], [0, 0, 0, 1, 1]])
    made = {"sliding_attention": mask.bool()[None, None], "full_attention": torch.ones(1, 1, 5, 5).bool().tril()}
    sight, given = (
        Sight(seeing_base("llava").model, seeing_base("llava").decoder, made.keys(), ()),
        torch.zeros(1, 5, 8),
    )
    features = sight._features({"inputs_embeds": given, "attention_mask": made}, 5)
    assert features.masks(5).keys() == {"sliding_attention"}
    assert torch.equal(features.masks(5)["sliding_attention"][0], mask.bool())
    assert torch.equal(features.part(1, 4).masks(4)["sliding_attention"][0], mask[1:4, :4].bool())
    assert features.borders is not None
    assert features.borders.cut(1, 3) == 4
    made["sliding_attention"][0, 0, 2, 2] = False
    with pytest.raises(RequestError, match="does not see all tokens"):
        sight._features({"inputs_embeds": given, "attention_mask": made}, 5)


def run_engine_with_errors(family: str, rows: list[Prompt]) -> list[Any]:
    engine = engine_of(seeing_base(family), PlainDecoding(), max_num_seqs=2)
    handles = [engine.submit(Request(row, SamplingParams(NEW, ignore_eos=True))) for row in rows]
    finish(engine)
    return [one.future.exception() or one.result(0).token_ids for one in handles]


def test_the_memory_plan_has_what_looking_at_images_takes() -> None:
    seeing, config = seeing_base("llava"), EngineConfig(max_num_seqs=2)
    assert seeing.sight is not None
    before = seeing.sight.bytes_per_token
    seeing.sight.bytes_per_token = 1000
    planned = plan_memory(seeing, PlainDecoding().spec, config, 300, 0)
    seeing.sight.bytes_per_token = before
    assert planned.items["images"] == KEPT_BYTES + 300_000
