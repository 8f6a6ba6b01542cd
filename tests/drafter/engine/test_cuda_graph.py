"""Steps that are queued as a whole and read a step later, with tapes for graphs: a GPU's path, but for CUDA."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from drafter import devices
from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, PlainDecoding
from drafter.engine.cuda_graph import CudaRecorder, Part, PartGraphs, Work
from drafter.engine.handle import Handle
from drafter.engine.queued_step import QueuedStep, padded_length, padded_nodes, padded_rows
from drafter.engine.step import DeviceStep, StepTensors
from drafter.engine.warm_up import record_steps
from drafter.errors import LoadError, RequestTimeoutError
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

RECORD_STEPS = record_steps
"""Which `queue_steps` leaves out, as it takes long with tapes."""
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
    monkeypatch.setattr(drafter, "propose", run_out(drafter.propose, {4, 7}))
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
    monkeypatch.setattr(DeviceStep, "verify", run_out(DeviceStep.verify, {9, 14}))
    engine = engine_of(tiny_base, PlainDecoding(), max_num_seqs=5, max_model_len=96)
    found = decode(engine, requests)
    assert engine.state().preemptions > 0
    assert tried == len(engine._queue.graphs._failed) > 1  # type: ignore[union-attr]  # each shape once
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
    whole, calls = QueuedStep.verify, 0

    def verify(queue: QueuedStep, tree: TokenTree, kv_length: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing and len(engine.scheduler.in_slots) > 1:
            raise torch.OutOfMemoryError("no memory")
        return whole(queue, tree, kv_length)

    monkeypatch.setattr(QueuedStep, "verify", verify)
    found = decode(engine, requests, stream=True)
    same(found, expected)


def test_a_draft_that_waits_runs_as_it_is_beside_graphs(
    tiny_base: BaseModel, recorder: TapeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    class Looks(AdversarialDrafter):
        calls = 0

        def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
            self.calls += 1
            assert int(context.lengths[0]) >= 0
            return super().propose(context, ask)

    requests, drafter = requests_of(6, SETTINGS[:1]), Looks(0)
    engine = engine_of(tiny_base, drafter, max_num_seqs=3, num_draft_tokens=4, max_model_len=96)
    same(decode(engine, requests), plainly(tiny_base, requests))
    assert recorder.repeated > 10
    assert drafter.calls > engine.state().steps / 2
    assert len([record for record in caplog.records if "CUDA graph" in record.message]) == 1


class Scripted(CudaRecorder):
    """A recorder that notes what it is asked, and has the problems it is given."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waits: str | None = None
        self.problem: Exception | None = None

    def watch(self, work: Work) -> tuple[Any, str | None]:
        self.log.append("watch")
        return work(), self.waits

    def restart(self) -> None:
        self.log.append("restart")

    def record(self, work: Work) -> Work:
        if self.problem is not None:
            try:
                raise self.problem
            finally:
                raise RuntimeError("the recording has failed before")
        self.log.append("record")
        return lambda: self.log.append("repeat")


def run_part(graphs: PartGraphs, script: Scripted, rows: int, kind: str = "verify", times: int = 1) -> None:
    for _ in range(times):
        graphs.run(Part(kind, rows), lambda: script.log.append(f"run {rows}"))


def test_a_part_is_run_then_recorded_then_repeated() -> None:
    """And before the first of its kind is recorded, it is watched."""
    script = Scripted()
    graphs = PartGraphs(script)
    slow = []
    for rows in (1, 1, 1, 2, 1, 2):
        run_part(graphs, script, rows)
        slow.append(graphs.slow)
    assert script.log == ["run 1", "watch", "run 1", "record", "repeat", "run 2", "repeat", "record", "repeat"]
    assert slow == [1, 2, 3, 4, 4, 5]


def test_what_waits_for_the_device_is_never_recorded() -> None:
    script = Scripted()
    script.waits = "model.py, line 7"
    graphs = PartGraphs(script)
    for rows in (1, 2):
        run_part(graphs, script, rows, times=3)
    assert script.log == ["run 1", "watch", *["run 1"] * 2, *["run 2"] * 3]
    assert graphs.slow == 2  # later ones take as long
    script.waits = None
    run_part(graphs, script, 1, "finish", times=3)
    assert script.log[7:] == ["run 1", "watch", "run 1", "record", "repeat"]


def test_what_cannot_be_recorded_costs_its_own_shape(caplog: pytest.LogCaptureFixture) -> None:
    """And names what went wrong first; memory that runs out is no reason to give up."""
    script = Scripted()
    graphs = PartGraphs(script)
    script.problem = RuntimeError("the loop looks at a number")
    run_part(graphs, script, 1, times=5)
    assert "the loop looks at a number" in caplog.text
    script.problem = torch.OutOfMemoryError("no memory")
    run_part(graphs, script, 1)  # not tried any more
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        run_part(graphs, script, 2, times=2)
    script.problem = None
    run_part(graphs, script, 2)
    assert script.log[-2:] == ["record", "repeat"]
    assert script.log.count("record") == 1


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.cuda_graph.MOST_GRAPHS", 2)
    script = Scripted()
    graphs = PartGraphs(script)
    for rows in (1, 2, 1, 3, 1, 2):  # the third takes the place of the second, which was used before the first
        run_part(graphs, script, rows, times=4)
    assert script.log.count("record") == 4


@pytest.mark.parametrize("nodes", [0, 4])
def test_steps_of_all_numbers_of_rows_are_recorded_at_start_the_largest_first(
    tiny_base: BaseModel, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    tried: list[tuple[int, int]] = []
    whole = QueuedStep.whole

    def noted(queue: QueuedStep, rows: int, count: int, longest: int) -> StepTensors:
        tried.append((rows, count))
        return whole(queue, rows, count, longest)

    monkeypatch.setattr(QueuedStep, "whole", noted)
    monkeypatch.setattr("drafter.engine.warm_up.record_steps", RECORD_STEPS)
    drafter = AdversarialDrafter(0) if nodes else PlainDecoding()
    engine = engine_of(tiny_base, drafter, max_num_seqs=3, num_draft_tokens=nodes, max_model_len=64)
    first, *tried = tried  # the dearest step
    assert first == (3, drafter.spec.max_nodes)
    assert list(dict.fromkeys(tried)) == [(rows, count) for rows in (3, 2, 1) for count in ([4, 0] if nodes else [0])]
    assert engine.batch.lengths.tolist() == [64] * 3
    recorded = recorder.recorded
    requests = [Request([5 + row, 6], SamplingParams(20, ignore_eos=True)) for row in range(3)]
    same(decode(engine, requests), plainly(tiny_base, requests))
    assert recorder.recorded == recorded > 0


def test_graphs_that_do_not_fit_are_refused_at_the_start(
    tiny_base: BaseModel, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter.engine.warm_up.record_steps", RECORD_STEPS)
    monkeypatch.setattr(recorder, "record", run_out(recorder.record, {2}))
    with pytest.raises(LoadError, match=r"the CUDA graphs of steps of 3 slots do not fit .*lower max_num_seqs"):
        engine_of(tiny_base, PlainDecoding(), max_num_seqs=3, max_model_len=64)


def test_another_threads_waits_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA warns of them as of ours while a step is watched."""
    for name, result in (("get_sync_debug_mode", 0), ("set_sync_debug_mode", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *mode, result=result: result)
    recorder = CudaRecorder.__new__(CudaRecorder)

    def wait() -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    def work() -> int:
        other = threading.Thread(target=wait)
        other.start()
        other.join()
        return 3

    assert recorder.watch(work) == (3, None)
    result, waits = recorder.watch(wait)
    assert result is None
    assert waits is not None
    assert "test_cuda_graph.py, line" in waits


def test_a_drafter_that_reads_what_the_host_knows_is_never_behind(tiny_base: BaseModel, recorder: TapeRecorder) -> None:
    """All steps have landed when it drafts, and the target model's forward is repeated as before."""
    requests = requests_of(6, SETTINGS[:1])

    class OnHost(AdversarialDrafter):
        ahead: ClassVar[set[int]] = set()

        def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
            self.ahead.add(context.ahead)
            return super().propose(context, ask)

    drafter = OnHost(0)
    drafter.spec = replace(drafter.spec, graph_safe=False)
    engine = engine_of(tiny_base, drafter, max_num_seqs=3, num_draft_tokens=8, max_model_len=96)
    found = decode(engine, requests)
    assert drafter.ahead == {0}
    assert recorder.repeated > engine.state().steps  # two of the three parts
    same(found, plainly(tiny_base, requests))


@pytest.mark.parametrize(("sampled", "drawn"), [(False, False), (True, False), (True, True)])
def test_rows_that_want_log_probabilities_keep_nobody_waiting(
    tiny_base: BaseModel, recorder: TapeRecorder, sampled: bool, drawn: bool
) -> None:
    """One step is under way meanwhile, as before and after."""
    how: dict[str, Any] = {"ignore_eos": True}
    if sampled:
        how |= {"temperature": 0.9, "seed": 4, "frequency_penalty": 0.8}
    requests = [
        Request([5, 6, 7], SamplingParams(40, **how)),
        Request([8, 9, 10], SamplingParams(6, logprobs=1, **how), drawn_logprobs=drawn),
    ]
    expected = plainly(tiny_base, requests)
    engine = engine_of(tiny_base, AdversarialDrafter(0), max_num_seqs=3, num_draft_tokens=4, max_model_len=96)
    handles = [engine.submit(requests[0])]
    for _ in range(5):
        engine.step()
    handles.append(engine.submit(requests[1]))
    while not handles[1].future.done():
        engine.step()
        assert len(engine.flights) == 1
    finish(engine)
    same([handle.result(0) for handle in handles], expected)


def test_sizes_repeat() -> None:
    assert [padded_rows(rows, 45) for rows in (1, 2, 3, 5, 8, 9, 16, 17, 40, 41)] == [1, 2, 4, 8, 8, 16, 16, 24, 40, 45]
    assert [padded_nodes(nodes, 50) for nodes in (0, 1, 3, 4, 8, 12, 16, 47, 48, 50)] == [
        0, 3, 3, 5, 9, 15, 23, 47, 50, 50,
    ]  # fmt: skip
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
