"""Steps that are queued as a whole and read a step later, with tapes for graphs: a GPU's path, but for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from drafter import devices
from drafter.acceptance.choices import SamplingMode
from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, PlainDecoding
from drafter.engine.cuda_graph import CudaRecorder, StepGraphs, StepShape, padded_length, padded_rows
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.engine.step import DeviceStep, StepTensors
from drafter.errors import RequestTimeoutError
from drafter.requests import Generation, Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree, from_nodes
from tests.support.exhaustion import run_out
from tests.support.heads import make_head
from tests.support.marks import slow_but_tuples
from tests.support.models import (
    VOCABULARY,
    AdversarialDrafter,
    decode,
    engine_of,
    finish,
    plainly,
    random_model,
    random_prompts,
    texts_of,
    tokens_of,
)
from tests.support.tapes import TapeRecorder, queue_steps

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 9, "frequency_penalty": 0.4},
    {"logit_bias": {7: 2.0, 9: -1.0}},
    {"logprobs": 2},
    {"min_tokens": 7, "bad_words": ["5", "7 9", "9 9 7"]},
    {"allowed_token_ids": [*range(3, 30)], "temperature": 1.0},
]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    """Engines that are made with it treat the CPU as a device that works behind their back."""
    return queue_steps(monkeypatch)


def requests_of(count: int, settings: list[dict[str, Any]], tokens: int = 24) -> list[Request]:
    return [
        Request(
            prompt,
            SamplingParams(tokens - 3 * (row % 4), seed=row, ignore_eos=row % 3 > 0, **settings[row % len(settings)]),
        )
        for row, prompt in enumerate(random_prompts(count, seed=3))
    ]


def run(
    base: BaseModel, drafter: Drafter, requests: list[Request], *, stream: bool = False, **config: Any
) -> list[Generation]:
    engine = engine_of(base, drafter, **{"max_model_len": 96, **config})
    return decode(engine, requests, stream=stream)


def same(found: list[Generation], expected: list[Generation]) -> None:
    assert tokens_of(found) == tokens_of(expected)
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        if theirs.logprobs is None:
            assert ours.logprobs is None
            continue
        assert ours.logprobs is not None
        assert [one.token_id for one in ours.logprobs] == [one.token_id for one in theirs.logprobs]
        assert [one.logprob for one in ours.logprobs] == pytest.approx(
            [one.logprob for one in theirs.logprobs], abs=1e-4
        )


class Foreseeing(Drafter):
    """Knows the continuation of a few texts, and says it without looking at what is on the device."""

    depth = 4
    spec = DraftSpec(4, 4)

    def __init__(self, requests: list[Request], generations: list[Generation]) -> None:
        texts = texts_of(requests, generations)
        width = max(map(len, texts)) + self.depth + 1
        self._texts = torch.tensor([text + [0] * (width - len(text)) for text in texts])

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        width, size = self._texts.shape[1], ask.nodes + 1
        written = torch.arange(width) > context.lengths[:, None]
        tokens = torch.nn.functional.pad(context.tokens, (0, width))[:, :width]
        text = ((tokens[:, None] == self._texts) | written[:, None]).all(-1).int().argmax(-1)
        place = context.lengths[:, None] + torch.arange(1, size)
        told = self._texts[text].gather(1, place.clamp_max(width - 1))
        level = torch.arange(size - 1)
        shape = (len(text), size - 1)
        return from_nodes(
            context.pending,
            told,
            (level - 1).expand(shape),
            (level + 1).expand(shape),
            -level.expand(shape).float(),
            size,
        )


@pytest.mark.parametrize(
    ("settings", "stream"),
    slow_but_tuples(
        [(SETTINGS, True), (SETTINGS, False)],
        [(SETTINGS, True), (SETTINGS, False), *(([one], bool(row % 2)) for row, one in enumerate(SETTINGS))],
    ),
    ids=str,
)
def test_the_same_tokens_under_every_setting(
    tiny_base: BaseModel, recorder: TapeRecorder, settings: list[dict[str, Any]], stream: bool
) -> None:
    requests = requests_of(12, settings)
    found = run(tiny_base, AdversarialDrafter(0), requests, max_num_seqs=5, num_draft_tokens=6, stream=stream)
    same(found, plainly(tiny_base, requests))


def test_every_accepted_token_is_counted_once(tiny_base: BaseModel, recorder: TapeRecorder) -> None:
    requests = requests_of(9, SETTINGS[:2])
    expected = plainly(tiny_base, requests)
    found = run(tiny_base, Foreseeing(requests, expected), requests, max_num_seqs=4, num_draft_tokens=4)
    same(found, expected)
    for one in found:
        assert one.counts.num_output_tokens == len(one.token_ids)
        assert one.counts.num_decode_steps < len(one.token_ids) / 2


@pytest.mark.parametrize("scaled", [False, True])
def test_empty_slots_are_no_texts_at_the_end_of_the_models_positions(recorder: TapeRecorder, scaled: bool) -> None:
    """A table of positions must not be read past its end; and some models scale all positions where any is large."""
    model = random_model("gpt2")
    if scaled:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": VOCABULARY}
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
        lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 64}
        config = Phi3Config(**sizes, **ends, **layers, **lengths, rope_parameters=rope)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0)
    base = BaseModel(model)
    requests = requests_of(3, SETTINGS[:1])
    assert all(len(one.prompt_ids) + 24 < 64 for one in requests)
    found = run(
        base, AdversarialDrafter(0), requests, max_num_seqs=4, num_draft_tokens=6, max_model_len=base.max_positions
    )
    same(found, plainly(base, requests, max_model_len=base.max_positions))


def test_the_budget_learns_and_the_text_is_the_same(tiny_base: BaseModel, recorder: TapeRecorder) -> None:
    requests = requests_of(10, SETTINGS[:2], tokens=40)
    expected = plainly(tiny_base, requests)
    found = run(tiny_base, Foreseeing(requests, expected), requests, max_num_seqs=4, num_draft_tokens="auto")
    same(found, expected)
    assert sum(one.counts.num_draft_tokens for one in found) > 0


def test_who_leaves_and_who_is_late_cost_nobody_else(tiny_base: BaseModel, recorder: TapeRecorder) -> None:
    requests = requests_of(6, SETTINGS[:1], tokens=40)
    requests[1] = Request(requests[1].prompt_ids, requests[1].sampling, timeout=1e-6)
    engine = engine_of(tiny_base, AdversarialDrafter(0), max_num_seqs=4, max_model_len=96, num_draft_tokens=6)
    handles = [engine.submit(request, stream=row == 3) for row, request in enumerate(requests)]
    for _ in range(4):
        engine.step()
    assert not handles[0].future.done()
    handles[0].cancel()
    finish(engine)
    expected = plainly(tiny_base, [Request(one.prompt_ids, one.sampling) for one in requests])
    cancelled = handles[0].result(0)
    assert cancelled.finish_reason == "cancelled"
    assert cancelled.token_ids == expected[0].token_ids[: len(cancelled.token_ids)]
    with pytest.raises(RequestTimeoutError):
        handles[1].result(0)
    same([handle.result(0) for handle in handles[2:]], expected[2:])
    assert "".join(delta.text for delta in handles[3]) == expected[3].text


def test_running_out_of_memory_with_a_step_under_way(
    tiny_base: BaseModel, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(7, SETTINGS)
    expected = plainly(tiny_base, requests)
    drafter = make_head(tiny_base, "ctc").drafter(tiny_base, 8)
    monkeypatch.setattr(drafter, "propose", run_out(drafter.propose, {4, 9}))
    engine = engine_of(tiny_base, drafter, max_num_seqs=5, max_model_len=96, num_draft_tokens=8)
    found = decode(engine, requests)
    assert engine.state().preemptions > 0
    assert recorder.restarts == 2
    same(found, expected)


def test_running_out_of_memory_after_a_recording_has_failed(
    tiny_base: BaseModel, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording that is refused can leave CUDA's allocator unable to give memory back; no request suffers."""
    tried = 0

    def refuse(step: Callable[[], StepTensors]) -> Callable[[], StepTensors]:
        nonlocal tried
        tried += 1
        raise RuntimeError("operation not permitted when stream is capturing")

    def give_back() -> None:
        raise RuntimeError("the allocator is recording")

    monkeypatch.setattr(recorder, "record", refuse)
    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    monkeypatch.setattr(
        devices, "release_unused", lambda device, real=devices.release_unused: real(torch.device("cuda"))
    )
    requests = requests_of(7, SETTINGS[:1])
    expected = plainly(tiny_base, requests)
    monkeypatch.setattr(Engine, "decode_shape", staticmethod(run_out(Engine.decode_shape, {9, 14})))
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=5, max_model_len=96)
    found = decode(engine, requests)
    assert engine.state().preemptions > 0
    assert tried == 1
    same(found, expected)


@pytest.mark.parametrize("failing", range(1, 9))
def test_running_out_of_memory_while_a_long_prompt_is_read(
    tiny_base: BaseModel, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The rows may all have ended by then, and the one that enters is not in its slot as a whole."""
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 8)
    requests = [
        Request([5, 6, 7], SamplingParams(4, ignore_eos=True)),
        Request(list(range(8, 60)), SamplingParams(6, ignore_eos=True)),
    ]
    expected = plainly(tiny_base, requests)
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=3, max_model_len=96)
    whole, calls = Engine.decode_shape, 0

    def step(device_step: DeviceStep, shape: StepShape) -> StepTensors:
        nonlocal calls
        calls += 1
        if calls == failing and len(engine.scheduler.in_slots) > 1:
            raise torch.OutOfMemoryError("no memory")
        return whole(device_step, shape)

    monkeypatch.setattr(Engine, "decode_shape", staticmethod(step))
    found = decode(engine, requests, stream=True)
    same(found, expected)


def test_a_step_that_cannot_be_recorded_runs_as_it_is(
    tiny_base: BaseModel, recorder: TapeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    class Looks(AdversarialDrafter):
        def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
            assert int(context.lengths[0]) >= 0
            return super().propose(context, ask)

    requests = requests_of(6, SETTINGS[:1])
    same(run(tiny_base, Looks(0), requests, max_num_seqs=3, num_draft_tokens=4), plainly(tiny_base, requests))
    assert recorder.recorded == 0
    assert [record.message for record in caplog.records if "CUDA graph" in record.message] != []
    assert len([record for record in caplog.records if "CUDA graph" in record.message]) == 1


class Scripted(CudaRecorder):
    """A recorder that notes what it is asked, and has the problems it is given."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waits: str | None = None
        self.problem: Exception | None = None

    def report(self, what: str = "run") -> StepTensors:
        self.log.append(what)
        return StepTensors(torch.zeros(1, 1), 0)

    def watch(self, step: Callable[[], StepTensors]) -> tuple[StepTensors, str | None]:
        self.log.append("watch")
        return step(), self.waits

    def restart(self) -> None:
        self.log.append("restart")

    def record(self, step: Callable[[], StepTensors]) -> Callable[[], StepTensors]:
        if self.problem is not None:
            try:
                raise self.problem
            finally:
                raise RuntimeError("the recording has failed before")
        self.log.append("record")
        return lambda: self.report("repeat")


def shape_of(rows: int, nodes: int = 0) -> StepShape:
    return StepShape(rows, nodes, 64, SamplingMode.of([]), ())


def test_a_shape_is_run_then_recorded_then_repeated() -> None:
    """And before the first of its kind is recorded, it is watched."""
    script = Scripted()
    graphs = StepGraphs(script, lambda shape: script.report(f"run {shape.rows}"))
    for rows in (1, 1, 1, 2, 1, 2):
        graphs.run(shape_of(rows))
    assert script.log == ["run 1", "watch", "run 1", "record", "repeat", "run 2", "repeat", "record", "repeat"]


def test_what_waits_for_the_device_is_never_recorded(caplog: pytest.LogCaptureFixture) -> None:
    script = Scripted()
    script.waits = "model.py, line 7"
    graphs = StepGraphs(script, lambda shape: script.report())
    for rows in (1, 2):
        for _ in range(3):
            graphs.run(shape_of(rows, 4))
    assert script.log == ["run", "watch", *["run"] * 5]
    assert caplog.text.count("model.py, line 7") == 1
    script.waits = None
    graphs.warm_up(shape_of(1))  # of another kind
    assert script.log[7:] == ["run", "watch", "run", "record", "repeat"]


def test_what_cannot_be_recorded_leaves_alone_what_could(caplog: pytest.LogCaptureFixture) -> None:
    """And names what went wrong first; memory that runs out is no reason to give up."""
    script = Scripted()
    graphs = StepGraphs(script, lambda shape: script.report())
    graphs.warm_up(shape_of(1))
    script.problem = RuntimeError("the loop looks at a number")
    graphs.warm_up(shape_of(1, 4))
    assert "the loop looks at a number" in caplog.text
    script.problem = torch.OutOfMemoryError("no memory")
    graphs.warm_up(shape_of(2, 4))  # not tried any more
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        graphs.warm_up(shape_of(2))
    script.problem = None
    graphs.warm_up(shape_of(2))
    assert script.log.count("record") == 2


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.cuda_graph.MOST_GRAPHS", 2)
    script = Scripted()
    graphs = StepGraphs(script, lambda shape: script.report())
    for rows in (1, 2, 1, 3, 1, 2):  # the third takes the place of the second, which was used before the first
        graphs.warm_up(shape_of(rows))
        graphs.run(shape_of(rows))
    assert script.log.count("record") == 4


def test_a_drafter_that_reads_what_the_host_knows_is_never_behind(tiny_base: BaseModel, recorder: TapeRecorder) -> None:
    requests = requests_of(6, SETTINGS[:1])
    drafter = AdversarialDrafter(0)
    drafter.spec = replace(drafter.spec, graph_safe=False)
    engine = engine_of(tiny_base, drafter, max_num_seqs=3, num_draft_tokens=8, max_model_len=96)
    assert engine.flights.lag == 0
    found = decode(engine, requests)
    same(found, plainly(tiny_base, requests))


@pytest.mark.parametrize("sampled", [False, True])
def test_the_host_follows_steps_of_rows_that_want_log_probabilities(
    tiny_base: BaseModel, recorder: TapeRecorder, sampled: bool
) -> None:
    """All steps have landed meanwhile, and none is queued; before and after, one is under way."""
    how: dict[str, Any] = {"ignore_eos": True, **({"temperature": 0.9, "seed": 4} if sampled else {})}
    requests = [
        Request([5, 6, 7], SamplingParams(40, **how)),
        Request([8, 9, 10], SamplingParams(6, logprobs=1, **how)),
    ]
    expected = plainly(tiny_base, requests)
    engine = engine_of(tiny_base, AdversarialDrafter(0), max_num_seqs=3, num_draft_tokens=4, max_model_len=96)
    handles = [engine.submit(requests[0])]
    for _ in range(5):
        engine.step()
        assert len(engine.flights) == 1
    queued = recorder.repeated
    handles.append(engine.submit(requests[1]))
    while not handles[1].future.done():
        engine.step()
        assert len(engine.flights) == 0
    assert recorder.repeated == queued > 0
    engine.step()
    assert len(engine.flights) == 1
    finish(engine)
    same([handle.result(0) for handle in handles], expected)


def test_sizes_repeat() -> None:
    assert [padded_rows(rows, 45) for rows in (1, 2, 3, 5, 8, 9, 16, 17, 40, 41)] == [1, 2, 4, 8, 8, 16, 16, 24, 40, 45]
    lengths = [padded_length(length, 1000) for length in (1, 64, 65, 97, 129, 200, 257, 385, 513, 769, 990)]
    assert lengths == [64, 64, 96, 128, 192, 256, 384, 512, 768, 1000, 1000]


def test_nothing_is_left_when_the_last_step_has_landed(tiny_base: BaseModel, recorder: TapeRecorder) -> None:
    engine = engine_of(tiny_base, AdversarialDrafter(0), max_num_seqs=4, max_model_len=96, num_draft_tokens=4)
    steps = 0
    for _ in range(2):
        handles: list[Handle] = [engine.submit(request) for request in requests_of(3, SETTINGS[:1])]
        finish(engine)
        assert all(handle.future.done() for handle in handles)
        assert len(engine.flights) == 0
        assert engine.batch.lengths.tolist() == [96] * 4
        steps += sum(handle.result(0).counts.num_decode_steps for handle in handles)
    assert engine.state().row_steps == steps
