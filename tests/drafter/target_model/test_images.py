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
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.engine.memory import plan_memory
from drafter.errors import RequestError
from drafter.prompt import Prompt
from drafter.requests import Request, SamplingParams
from drafter.target_model.architecture import small_copy
from drafter.target_model.model import BaseModel
from drafter.target_model.sight import KEPT_BYTES, Borders, Sight
from tests.support.heads import make_head
from tests.support.images import CONFIGS, FAMILIES, asked, base_of, picture, processor_of
from tests.support.marks import slow_but
from tests.support.models import DEVICE, AdversarialDrafter, OracleDrafter, SpellingTokenizer, run_engine
from tests.support.tapes import queue_steps

NEW = 12
QUICK = ["llava", "qwen3_vl", "gemma3", "paligemma"]


@cache
def base(family: str) -> BaseModel:
    return base_of(family)


@cache
def prompts(family: str) -> list[Prompt]:
    """Rows with 0 to 3 images of different sizes; the same words with other images; and the same images."""
    encode = processor_of(family).encode
    one, two, three = picture(1, 24, 24), picture(2, 40, 30), picture(3, 20, 50)
    return [
        encode(asked("What is this?"), [one]),
        encode(asked("What is this?"), [two]),
        encode(asked("No image here: count to 5.", 0)),
        encode(asked("Which is larger?", 2), [one, three]),
        encode(asked("All of these, then!", 3), [three, two, one]),
        encode(asked("What is that?"), [two]),
        encode(asked("And another text.", 0)),
    ]


def reference(model: Any, prompt: Prompt) -> list[int]:
    inputs = {name: torch.from_numpy(value).to(DEVICE) for name, value in prompt.inputs.items()}
    ids = torch.tensor([list(prompt.ids)], device=DEVICE)
    made = model.generate(input_ids=ids, **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return made[0, len(prompt.ids) :].tolist()  # type: ignore[no-any-return]


@cache
def expected(family: str) -> list[list[int]]:
    return [reference(base(family).model, prompt) for prompt in prompts(family)]


def requests(family: str, **sampling: Any) -> list[Request]:
    settings = SamplingParams(NEW, ignore_eos=True, **sampling)
    return [Request(prompt, settings) for prompt in prompts(family)]


def tokens(family: str, drafter: Drafter, asked: list[Request] | None = None, **config: Any) -> list[list[int]]:
    settings = {"max_num_seqs": 4, "num_draft_tokens": 7} | config
    return [one.token_ids for one in run_engine(base(family), drafter, asked or requests(family), **settings)]


def oracle(family: str) -> OracleDrafter:
    return OracleDrafter([[*one.ids, *text] for one, text in zip(prompts(family), expected(family), strict=True)])


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_rows_with_images_are_continued_as_generate_does(family: str) -> None:
    assert base(family).sight is not None, base(family).blind
    assert expected(family)[0] != expected(family)[1]  # or the images do not matter
    for drafter in (PlainDecoding(), oracle(family), AdversarialDrafter(0)):
        assert tokens(family, drafter) == expected(family), type(drafter)


@pytest.mark.parametrize("family", slow_but(["qwen3_vl", "gemma3"], FAMILIES))
def test_a_prompt_is_cut_where_its_tokens_do_not_see_each_other(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 5)
    assert tokens(family, oracle(family)) == expected(family)


@pytest.mark.parametrize("family", slow_but(["qwen3_vl"], QUICK[:3]))
def test_rows_with_images_that_have_ended_are_continued_from(family: str) -> None:
    config = EngineConfig(max_num_seqs=4, num_draft_tokens=7)
    engine = Engine(base(family), oracle(family), SpellingTokenizer(), config)
    for copied in (False, True):
        handles = [engine.submit(request) for request in requests(family)]
        while not engine.idle:
            engine.step()
        found = [handle.result(0) for handle in handles]
        assert [one.token_ids for one in found] == expected(family)
        assert not copied or sum(one.num_cached_tokens for one in found) > 0
    if family == "qwen3_vl":  # whose prompts may be cut anywhere
        assert [one.num_cached_tokens for one in found] == [len(prompt.ids) - 1 for prompt in prompts(family)]


@pytest.mark.parametrize("family", slow_but(["qwen2_vl"], FAMILIES))
def test_preempted_rows_see_their_images_again(family: str) -> None:
    longest = max(len(prompt.ids) for prompt in prompts(family)) + NEW
    need = base(family).cache_bytes
    room = need.slot * 4 + need.position * (2 * longest + 160)
    engine = Engine(
        base(family),
        oracle(family),
        SpellingTokenizer(),
        EngineConfig(max_num_seqs=4, num_draft_tokens=7, max_model_len=longest, kv_gib=room / 2**30),
    )
    handles = [engine.submit(request) for request in requests(family)]
    while not engine.idle:
        if engine.state().active > 1 and not engine.state().preemptions:
            engine._preempt()  # as a step whose memory has run out does
        engine.step()
    assert engine.state().preemptions
    assert [handle.result(0).token_ids for handle in handles] == expected(family)


@pytest.mark.parametrize("family", slow_but(["gemma3"], FAMILIES))
def test_streams_and_draws_are_those_of_plain_decoding(family: str) -> None:
    drawn = tokens(family, PlainDecoding(), requests(family, temperature=1.0, seed=3), max_num_seqs=1)
    texts = [[*one.ids, *text] for one, text in zip(prompts(family), drawn, strict=True)]
    assert tokens(family, OracleDrafter(texts), requests(family, temperature=1.0, seed=3)) == drawn
    engine = Engine(base(family), oracle(family), SpellingTokenizer(), EngineConfig(max_num_seqs=4))
    handles = [engine.submit(request, stream=True) for request in requests(family)]
    while not engine.idle:
        engine.step()
    assert [handle.result(0).token_ids for handle in handles] == expected(family)


@pytest.mark.parametrize("family", slow_but(["paligemma-2"], FAMILIES))
def test_log_probabilities_of_a_prompt_are_the_models_own(family: str) -> None:
    prompt = prompts(family)[3]  # longer than the window, where there is one
    request = Request(prompt, SamplingParams(NEW, ignore_eos=True, logprobs=0), prompt_logprobs=0)
    (found,) = run_engine(base(family), oracle(family), [request], max_num_seqs=1, num_draft_tokens=7)
    assert found.token_ids == expected(family)[3]
    inputs = {name: torch.from_numpy(value).to(DEVICE) for name, value in prompt.inputs.items()}
    ids = torch.tensor([list(prompt.ids)], device=DEVICE)
    with torch.inference_mode():
        own = base(family).model(input_ids=ids, **inputs).logits[0].log_softmax(-1)
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
        assert base("smolvlm").executor_name == "NativeDecoder"
    assert tokens("smolvlm", oracle("smolvlm")) == expected("smolvlm")


@pytest.mark.parametrize("family", slow_but(["qwen2_vl"], ["qwen2_vl", "idefics3", "gemma3"]))
def test_steps_are_queued_as_a_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tapes for CUDA graphs: a row's positions are what a slot has when a step runs, not when it was recorded."""
    seeing, recorder = base(family), queue_steps(monkeypatch)
    head = make_head(seeing, "ctc").drafter(seeing, 8)
    rows = [*requests(family), *requests(family)]
    found = [one.token_ids for one in run_engine(seeing, head, rows, max_num_seqs=3, num_draft_tokens=7)]
    assert found == [*expected(family), *expected(family)]
    assert recorder.repeated > 5


@pytest.mark.parametrize("family", slow_but(["llava", "idefics3", "qwen3_vl"], FAMILIES))
def test_images_are_looked_at_in_pieces_while_others_go_on(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeing, rows = base(family), requests(family)
    assert seeing.sight is not None
    monkeypatch.setattr("drafter.target_model.towers._PIXELS", 1)  # two tiles at a time
    monkeypatch.setattr(seeing.sight._towers, "_text_size", 0)  # and a rest before each layer
    seeing.sight.forget()
    engine = Engine(seeing, PlainDecoding(), SpellingTokenizer(), EngineConfig(max_num_seqs=4))
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
    while not engine.idle:
        engine.step()
    assert [handle.result(0).token_ids for handle in (*handles, last)] == [expected(family)[one] for one in (3, 4, 5)]
    assert len(text.result(0).token_ids) == 150


def test_rows_share_what_their_images_have_in_common() -> None:
    family = "llava"
    encode, image = processor_of(family).encode, picture(1)
    rows = [encode(asked(f"And question {number}?"), [picture(1 if number < 3 else 2)]) for number in range(4)]
    engine = Engine(base(family), PlainDecoding(), SpellingTokenizer(), EngineConfig(max_num_seqs=4))
    tower, calls = base(family).model.model.vision_tower, []
    hook = tower.register_forward_hook(lambda *call: calls.append(1))
    before = encode(asked("Is this another one?"), [image])  # whatever was kept of other tests
    base(family).sight.forget()  # type: ignore[union-attr]
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
    while not engine.idle:
        engine.step()
    found = [handle.result(0).token_ids for handle in handles]
    assert found == [reference(base(family).model, prompt) for prompt in rows]


def test_an_image_at_another_size_is_encoded_again() -> None:
    usual, large = processor_of("qwen3_vl"), processor_of("qwen3_vl")
    large.processor.image_processor.size = {"shortest_edge": 64 * 64, "longest_edge": 64 * 64}
    few, many = (one.encode(asked("What?"), [picture(1)]) for one in (usual, large))
    assert len(few.ids) < len(many.ids)
    sizes = [base("qwen3_vl").sight.features(prompt).size for prompt in (few, many)]  # type: ignore[union-attr]
    assert sizes == [len(few.ids), len(many.ids)]


def test_prompts_that_cannot_be_read_end_alone() -> None:
    family = "llava"
    good = prompts(family)[0]
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
    engine = Engine(base(family), PlainDecoding(), SpellingTokenizer(), EngineConfig(max_num_seqs=1))
    with pytest.raises(RequestError, match=reason):
        engine.submit(Request(change(prompts(family)[0])))


@pytest.mark.parametrize("family", slow_but(["llava"], QUICK))
def test_inputs_of_equal_digests_are_not_taken_for_each_other(family: str) -> None:
    """Prompts of anybody's: one digest for all images, which are of one size."""
    made = [processor_of(family).encode(asked("What is this?"), [picture(seed)]) for seed in (1, 2, 1)]
    rows = [Prompt(one.ids, tuple(replace(span, digest=b"") for span in one.spans), one.inputs) for one in made]
    assert made[0].ids == made[1].ids
    engine = Engine(base(family), PlainDecoding(), SpellingTokenizer(), EngineConfig(max_num_seqs=3))
    handles = []
    for row in rows:
        handles.append(engine.submit(Request(row, SamplingParams(NEW, ignore_eos=True))))
        engine.step()
    while not engine.idle:
        engine.step()
    assert [handle.result(0).token_ids for handle in handles] == [reference(base(family).model, one) for one in made]
    assert engine.state().shared_tokens == (len(rows[2].ids) - 1 if family != "paligemma" else 0)


def test_images_are_kept_for_their_own_salt() -> None:
    """How long a prompt takes does not tell one salt what another has sent."""
    prompt = processor_of("llava").encode(asked("What is this?"), [picture(7)])
    engine = Engine(base("llava"), PlainDecoding(), SpellingTokenizer(), EngineConfig(max_num_seqs=1))
    calls: list[int] = []
    hook = base("llava").model.model.vision_tower.register_forward_hook(lambda *call: calls.append(1))
    counts = []
    for salt in ("one", "two", "one", "two", ""):
        engine.submit(Request(prompt, SamplingParams(1), salt=salt))
        while not engine.idle:
            engine.step()
        counts.append(len(calls))
    hook.remove()
    assert counts == [1, 2, 2, 2, 3]


def test_a_model_of_text_refuses_images(tiny_base: BaseModel) -> None:
    engine = Engine(tiny_base, PlainDecoding(), SpellingTokenizer(), EngineConfig(max_num_seqs=1))
    with pytest.raises(RequestError, match=r"has images, and .* reads text alone"):
        engine.submit(Request(replace(prompts("llava")[0], ids=[3] * len(prompts("llava")[0].ids))))


def test_a_model_that_reads_images_otherwise_reads_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Sight.features
    monkeypatch.setattr(Sight, "features", lambda sight, *given: replace(own(sight, *given), shift=5))
    blind = base_of("qwen2_vl")
    assert blind.sight is None
    engine = Engine(blind, PlainDecoding(), SpellingTokenizer(), EngineConfig(max_num_seqs=1))
    with pytest.raises(RequestError, match="gives other logits after an image"):
        engine.submit(Request(prompts("qwen2_vl")[0]))


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
    sight, given = Sight(base("llava").model, base("llava").decoder, made.keys(), ()), torch.zeros(1, 5, 8)
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
    engine = Engine(base(family), PlainDecoding(), SpellingTokenizer(), EngineConfig(max_num_seqs=2))
    handles = [engine.submit(Request(row, SamplingParams(NEW, ignore_eos=True))) for row in rows]
    while not engine.idle:
        engine.step()
    return [one.future.exception() or one.result(0).token_ids for one in handles]


def test_the_memory_plan_has_what_looking_at_images_takes() -> None:
    seeing, config = base("llava"), EngineConfig(max_num_seqs=2)
    assert seeing.sight is not None
    before = seeing.sight.bytes_per_token
    seeing.sight.bytes_per_token = 1000
    planned = plan_memory(seeing, PlainDecoding().spec, config, 300, 0)
    seeing.sight.bytes_per_token = before
    assert planned.items["images"] == KEPT_BYTES + 300_000
