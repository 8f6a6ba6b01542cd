from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafter.acceptance.contract import Verified
from drafter.drafters.contract import Ask, DraftContext, DraftSpec, PlainDecoding
from drafter.engine.batch import BatchState
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.engine.step import DeviceStep
from drafter.errors import EngineError, LoadError, QueueFullError, RequestError, RequestTimeoutError
from drafter.requests import Request, SamplingParams, Timing
from drafter.statistics import STAGES
from drafter.target_model.cache import TargetCache
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import TreeNodes
from drafter.tree.token_tree import PAD_TOKEN, TokenTree, from_paths
from tests.support.caches import kv_of
from tests.support.heads import make_head
from tests.support.models import (
    AdversarialDrafter,
    OracleDrafter,
    SpellingTokenizer,
    generate_reference,
    plainly,
    random_prompts,
    run_engine,
    texts_of,
    tokens_of,
)


def engine_of(base: BaseModel, **config: object) -> Engine:
    return Engine(base, PlainDecoding(), SpellingTokenizer(), EngineConfig(**config))  # type: ignore[arg-type]


def finish(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def check_alone(base: BaseModel, handles: Sequence[Handle]) -> None:
    """Every result is what the request by itself has."""
    for handle in handles:
        alone = plainly(base, [handle.request])[0]
        assert handle.result(0).token_ids == alone.token_ids


def test_two_hundred_requests_through_eight_slots_grow_nothing(tiny_base: BaseModel) -> None:
    engine = Engine(
        tiny_base, AdversarialDrafter(0), SpellingTokenizer(), EngineConfig(max_num_seqs=8, num_draft_tokens=8)
    )
    before = engine.batch.cache.nbytes
    pointers = [buffer.data_ptr() for buffer in kv_of(engine.batch.cache).buffers]

    def live_bytes() -> int:
        gc.collect()
        # Not of other kinds: a compiler's stand-ins have no size.
        return sum(o.nbytes for o in gc.get_objects() if type(o) is torch.Tensor)

    sizes = []
    for batch in range(4):
        handles = [
            engine.submit(Request(prompt, SamplingParams(max_new_tokens=6))) for prompt in random_prompts(50, batch)
        ]
        finish(engine)
        assert all(handle.result(0).token_ids for handle in handles)
        del handles
        sizes.append(live_bytes())
    assert engine.batch.cache.nbytes == before
    assert [buffer.data_ptr() for buffer in kv_of(engine.batch.cache).buffers] == pointers
    # The last step's own tensors stay, which differ by a little; 150 requests must not leave 50 bytes each.
    assert sizes[-1] - sizes[0] < 150 * 50, sizes


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1.5], "integers"),
        ([5] * 128, "128 tokens"),
        ([97], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
    ],
)
def test_unusable_prompts_are_refused_at_submission(tiny_base: BaseModel, prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine_of(tiny_base).submit(Request(prompt))


def test_a_bias_outside_the_vocabulary_is_refused_at_submission(tiny_base: BaseModel) -> None:
    with pytest.raises(RequestError, match="token 97, outside the vocabulary of 97"):
        engine_of(tiny_base).submit(Request([5], SamplingParams(logit_bias={97: 1.0})))


def test_the_queue_is_bounded(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, max_queue=2)
    for _ in range(2):
        engine.submit(Request([5]))
    with pytest.raises(QueueFullError, match="2 requests"):
        engine.submit(Request([5]))


def test_a_shared_beginning_is_a_copy_bit_for_bit(tiny_base: BaseModel) -> None:
    drafter = make_head(tiny_base, "ctc").drafter(tiny_base, 4)
    engine = Engine(tiny_base, drafter, SpellingTokenizer(), EngineConfig(max_num_seqs=4, num_draft_tokens=4))
    beginning = list(range(10, 30))
    prompts = [[*beginning, 5, 6], [*beginning, 7, 8, 9], [3, *beginning], [*beginning, 5, 6]]
    for prompt in prompts:
        engine.submit(Request(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True)))
    engine.step()
    # The second row shares the beginning with the first, the fourth its whole prompt; the third begins otherwise.
    shared = {1: 20, 3: 21}
    state = engine.state()
    assert (state.shared_tokens, state.prefilled_tokens) == (41, 21 + 2 + 20 + 0)
    assert engine.batch.hidden is not None
    parts = [
        *(
            buffer.unflatten(0, (-1, 4, engine.batch.capacity)).transpose(0, 1)
            for buffer in kv_of(engine.batch.cache).buffers
        ),
        engine.batch.hidden[:, None],
    ]
    for buffer in parts:
        for row, length in shared.items():
            assert torch.equal(buffer[row, :, :length], buffer[0, :, :length])
    for row in shared:
        alone = tiny_base.prefill(tiny_base.new_cache(1, 64), 0, [torch.tensor(prompts[row][:-1])])
        assert torch.allclose(engine.batch.hidden[row, : len(prompts[row]) - 1], alone, atol=1e-4)


def test_a_cache_that_does_not_fit_is_refused_with_its_size(tiny_base: BaseModel) -> None:
    """64 positions and room for a draft, eight at a time, three layers of 2 × 2 × 8 numbers of 4 bytes."""
    with pytest.raises(
        LoadError, match=r"1,000,000,000 slots of 72 positions takes 25,7\d\d\.\d GiB .* lower max_num_seqs"
    ):
        Engine(
            tiny_base, PlainDecoding(), SpellingTokenizer(), EngineConfig(max_num_seqs=1_000_000_000, max_model_len=64)
        )


@pytest.mark.parametrize("stream", [True, False])
def test_rows_that_are_watched_do_not_wait_for_a_long_prompt(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 8)
    engine = engine_of(tiny_base, max_num_seqs=3)
    settings = SamplingParams(max_new_tokens=50, ignore_eos=True)
    first = engine.submit(Request([5], settings), stream=stream)
    engine.step()
    long, short = engine.submit(Request(list(range(3, 63)), settings)), engine.submit(Request([6, 7], settings))
    taken = []
    while not short.future.done():
        before = engine.state()
        engine.step()
        taken.append(engine.state().prefilled_tokens - before.prefilled_tokens)
        assert engine.state().row_steps > before.row_steps
    # 59 tokens of the long prompt and 1 of the short one.
    assert taken[:9] == ([8, 8, 8, 8, 8, 8, 8, 4, 0] if stream else [60] + [0] * 8)
    finish(engine)
    check_alone(tiny_base, [first, long, short])


def test_prompts_that_enter_together_are_read_together(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 16)
    prefill, sizes = tiny_base.prefill, []

    def counted(
        cache: TargetCache, slot: int, prompts: Sequence[torch.Tensor], *rest: Any, **more: Any
    ) -> torch.Tensor:
        sizes.append([len(prompt) for prompt in prompts])
        return prefill(cache, slot, prompts, *rest, **more)

    drafter = make_head(tiny_base, "ctc").drafter(tiny_base, 4)
    engine = Engine(tiny_base, drafter, SpellingTokenizer(), EngineConfig(max_num_seqs=8, num_draft_tokens=4))
    prompts = [range(3, 10), range(20, 25), range(30, 50), [7], range(60, 72), [*range(60, 70), 5]]
    handles = [engine.submit(Request(list(prompt), SamplingParams(9, ignore_eos=True))) for prompt in prompts]
    monkeypatch.setitem(vars(tiny_base), "prefill", counted)
    engine.step()
    # Of each all but the last token. The third is read in two pieces; the fourth has nothing to read; the last waits
    # for the beginning that it shares with the one before it, and is then there as a whole.
    assert sizes == [[6, 4, 6], [13], [11]]
    assert engine.state().shared_tokens == 10
    assert len(engine.scheduler.active) == 6
    finish(engine)
    monkeypatch.undo()
    check_alone(tiny_base, handles)


@pytest.mark.parametrize(
    ("new", "stream", "active"), [(1, False, [8, 8, 9]), (1, True, [9, 9, 9]), (4, False, [12, 12, 12])]
)
def test_sequences_wait_for_others_to_enter_with_them(
    tiny_base: BaseModel, new: int, stream: bool, active: list[int]
) -> None:
    engine, settings = engine_of(tiny_base, max_num_seqs=16), SamplingParams(20, ignore_eos=True)
    handles = [engine.submit(Request(prompt, settings)) for prompt in random_prompts(8)]
    engine.step()
    handles += [engine.submit(Request(prompt, settings), stream=stream) for prompt in random_prompts(new, seed=1)]
    found = []
    for _ in active:
        engine.step()
        found.append(engine.state().active)
    assert found == active
    finish(engine)
    check_alone(tiny_base, handles)


def test_requests_may_end_while_others_enter(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 8)
    drafter = make_head(tiny_base, "ctc").drafter(tiny_base, 4)
    engine = Engine(tiny_base, drafter, SpellingTokenizer(), EngineConfig(max_num_seqs=8, num_draft_tokens=4))

    def submit(prompt: Sequence[int], new_tokens: int, stream: bool) -> Handle:
        return engine.submit(Request(list(prompt), SamplingParams(new_tokens, ignore_eos=True)), stream=stream)

    short = submit([5], 2, True)
    engine.step()
    # The second is read by itself, as it is watched, and then the third, and with that the step has read enough.
    handles = [
        submit(range(3, 11), 9, True),
        submit([40, 41], 9, False),
        submit(range(50, 54), 9, True),
        submit(range(60, 64), 9, False),
        submit(range(70, 74), 9, False),
    ]
    engine.step()
    assert short.future.done()
    assert (len(engine.scheduler.active), engine.state().active) == (2, 5)
    handles[3].cancel()
    finish(engine)
    assert handles.pop(3).result(0).token_ids == []
    check_alone(tiny_base, [short, *handles])


def test_cancelling_while_a_prompt_is_read_makes_room(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 8)
    engine = engine_of(tiny_base, max_num_seqs=2)
    settings = SamplingParams(max_new_tokens=9, ignore_eos=True)
    watched = engine.submit(Request([5], settings), stream=True)
    engine.step()
    long, after = engine.submit(Request(list(range(3, 63)), settings)), engine.submit(Request([6, 7], settings))
    engine.step()
    assert (len(engine.scheduler.active), engine.state().active, engine.state().waiting) == (1, 2, 1)
    long.cancel()
    engine.step()
    assert long.result(0).token_ids == []
    assert (len(engine.scheduler.active), engine.state().active) == (2, 2)
    finish(engine)
    assert len(watched.result(0).token_ids) == len(after.result(0).token_ids) == 9


def test_a_failure_reaches_the_request_whose_prompt_is_read(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 8)
    engine = engine_of(tiny_base, max_num_seqs=2)
    engine.submit(Request([5], SamplingParams(ignore_eos=True)), stream=True)
    engine.step()
    long = engine.submit(Request(list(range(3, 63))))
    engine.step()
    engine.fail(RuntimeError("device lost"))
    with pytest.raises(EngineError, match="device lost"):
        long.result(0)
    assert engine.idle


def test_cancelling_frees_the_slot_within_a_step(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, max_num_seqs=2)
    endless = SamplingParams(max_new_tokens=100, ignore_eos=True)
    first, second, waiting = (engine.submit(Request([5, 6], endless)) for _ in range(3))
    for _ in range(3):
        engine.step()
    first.cancel()
    waiting.cancel()
    engine.step()
    assert first.result(0).finish_reason == "cancelled"
    assert len(first.result(0).token_ids) == 3
    assert waiting.result(0).token_ids == []
    assert len(engine.scheduler.active) == 1
    finish(engine)
    assert len(second.result(0).token_ids) == 100


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stops the monotonic clock; a call moves it on by so many seconds."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def move_on(seconds: float) -> None:
        nonlocal now
        now += seconds

    return move_on


def test_a_request_that_runs_over_ends_alone(tiny_base: BaseModel, clock: Callable[[float], None]) -> None:
    engine = engine_of(tiny_base, max_num_seqs=2)
    endless = SamplingParams(max_new_tokens=60, ignore_eos=True)
    decoding, free = engine.submit(Request([5], endless, timeout=3.0)), engine.submit(Request([6], endless))
    waiting = engine.submit(Request([7], endless, timeout=2.5), stream=True)
    for _ in range(3):  # at 0, 1 and 2 seconds
        engine.step()
        clock(1.0)
    assert not waiting.future.done()  # its time was not up when the last step began
    engine.step()
    for handle, seconds, tokens in ((decoding, 3, 3), (waiting, 2.5, 0)):
        with pytest.raises(RequestTimeoutError, match=rf"within its {seconds:g} seconds \({tokens} tokens"):
            handle.result(0)
    assert list(waiting) == []
    assert (len(engine.scheduler.active), engine.state().waiting) == (1, 0)
    finish(engine)
    assert len(free.result(0).token_ids) == 60


def test_timing_is_since_submission(tiny_base: BaseModel, clock: Callable[[float], None]) -> None:
    engine = engine_of(tiny_base, max_num_seqs=1)
    two = SamplingParams(max_new_tokens=2, ignore_eos=True)
    first, second, third = (engine.submit(Request([5], two)) for _ in range(3))
    for _ in range(5):
        if engine.state().steps == 3:
            third.cancel()
        engine.step()
        clock(1.0)
    assert first.result(0).timing == Timing(queued=0.0, first_token=0.0, total=1.0)
    assert second.result(0).timing == Timing(queued=2.0, first_token=2.0, total=3.0)
    assert third.result(0).timing == Timing(queued=None, first_token=None, total=3.0)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf"), "1"])
def test_bad_time_limits_are_refused(timeout: Any) -> None:
    with pytest.raises(RequestError, match="timeout"):
        Request([5], timeout=timeout)


def test_the_state_says_what_the_engine_is_doing(tiny_base: BaseModel, clock: Callable[[float], None]) -> None:
    engine = engine_of(tiny_base, max_num_seqs=2)
    clock(500.0)
    for length in (3, 4, 5):
        engine.submit(Request([5], SamplingParams(max_new_tokens=length, ignore_eos=True)))
    assert time.monotonic() == engine.last_step  # it has only just got work
    clock(1.0)
    before = engine.state()
    assert (before.active, before.waiting, before.slots, before.steps) == (0, 3, 2, 0)
    assert before.busy_seconds == 0
    engine.step()
    assert engine.last_step == time.monotonic()
    state = engine.state()
    assert (state.active, state.waiting, state.steps, state.row_steps, state.output_tokens) == (2, 1, 1, 2, 2)
    finish(engine)
    state = engine.state()
    assert (state.active, state.waiting, state.row_steps, state.output_tokens) == (0, 0, 12, 12)
    assert list(state.stage_seconds) == list(STAGES)
    assert state.stage_seconds["verify"] > 0
    assert state.stage_seconds["draft"] == 0  # plain decoding
    assert state.busy_seconds == pytest.approx(sum(state.stage_seconds.values()))


def test_streamed_pieces_join_to_the_text(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base)
    settings = SamplingParams(max_new_tokens=12, ignore_eos=True)
    plain = engine.submit(Request([5, 6], settings))
    streamed = engine.submit(Request([5, 6], settings), stream=True)
    word = plain.request
    finish(engine)
    stop = (" " + plain.result(0).text.split()[7],)
    stopped = engine.submit(Request(word.prompt_ids, SamplingParams(12, stop=stop, ignore_eos=True)), stream=True)
    finish(engine)
    for handle in (streamed, stopped):
        deltas = list(handle)
        assert "".join(delta.text for delta in deltas) == handle.result(0).text
        assert [token for delta in deltas for token in delta.token_ids] == handle.result(0).token_ids
    assert stop[0] not in stopped.result(0).text
    with pytest.raises(TypeError, match="stream=True"):
        list(plain)


def test_log_probabilities_are_the_bases_own(tiny_base: BaseModel) -> None:
    """Of raw logits, whatever penalties and temperature did to the choice; only for rows that ask."""
    settings = SamplingParams(6, temperature=1.5, logit_bias={9: 3.0}, presence_penalty=2.0, ignore_eos=True)
    asked = [None, 0, 3, 20]
    engine = engine_of(tiny_base, max_num_seqs=4)
    prompts = random_prompts(4)
    handles = [
        engine.submit(Request(prompt, replace(settings, logprobs=top, seed=row)), stream=True)
        for row, (prompt, top) in enumerate(zip(prompts, asked, strict=True))
    ]
    finish(engine)
    for prompt, top, handle in zip(prompts, asked, handles, strict=True):
        found = handle.result(0)
        pieces = [delta.logprobs for delta in handle]
        if top is None:
            assert found.logprobs is None
            assert pieces == [None] * len(pieces)
            continue
        assert found.logprobs is not None
        assert [one for piece in pieces for one in piece or ()] == found.logprobs
        logits = tiny_base.model(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        for token, one, place in zip(found.token_ids, found.logprobs, expected, strict=True):
            assert one.token_id == token
            assert one.logprob == pytest.approx(place[token].item(), abs=1e-4)
            best = place.topk(top)
            assert [token for token, _ in one.top] == best.indices.tolist()
            assert [logprob for _, logprob in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_failed_step_ends_every_request_with_the_reason(tiny_base: BaseModel) -> None:
    engine = engine_of(tiny_base, max_num_seqs=1)
    handles = [engine.submit(Request([5])) for _ in range(2)]
    engine.step()
    engine.fail(RuntimeError("device lost"))
    for handle in handles:
        with pytest.raises(EngineError, match="device lost"):
            handle.result(0)
    with pytest.raises(EngineError, match="device lost"):
        engine.submit(Request([5]))


def test_a_length_beyond_the_base_is_refused(tiny_base: BaseModel) -> None:
    with pytest.raises(LoadError, match="128 positions"):
        engine_of(tiny_base, max_model_len=4096)


@pytest.mark.parametrize(
    "config", [{"max_num_seqs": 0}, {"num_draft_tokens": -1}, {"num_draft_tokens": "many"}, {"max_queue": True}]
)
def test_bad_sizes_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        EngineConfig(**config)  # type: ignore[arg-type]


# ---- who watches


@pytest.mark.parametrize("stream", [True, False])
def test_who_watches_gets_the_first_token_with_the_prompts_forward(
    tiny_base: BaseModel, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(
        tiny_base, AdversarialDrafter(0), SpellingTokenizer(), EngineConfig(max_num_seqs=2, num_draft_tokens=4)
    )
    verified: list[int] = []
    verify = tiny_base.verify

    def seen(cache: TargetCache, nodes: TreeNodes) -> Any:
        verified.append(nodes.tokens.shape[1])
        return verify(cache, nodes)

    monkeypatch.setitem(vars(tiny_base), "verify", seen)
    handles = [
        engine.submit(Request([3, 4, 5], SamplingParams(max_new_tokens=count, ignore_eos=True)), stream=stream)
        for count in (1, 6)
    ]
    engine.step()
    assert handles[0].future.done()
    assert len(verified) == 1  # one tree a row, of one row where the first is done already
    state = engine.state()
    assert (state.steps, state.row_steps) == ((3, 3) if stream else (1, 2))
    finish(engine)
    for handle, count in zip(handles, (1, 6), strict=True):
        result = handle.result(0)
        assert result.token_ids == generate_reference(tiny_base.model, [3, 4, 5], count)
        assert result.counts.num_output_tokens == count
        assert sum(accepted + 1 for accepted in result.counts.per_step_accepted) >= count


def test_who_comes_while_a_step_drafts_enters_in_its_middle(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = AdversarialDrafter(0)
    engine = Engine(tiny_base, drafter, SpellingTokenizer(), EngineConfig(max_num_seqs=3, num_draft_tokens=4))
    late: list[Handle] = []
    propose = drafter.propose

    def proposes(context: DraftContext, ask: Ask) -> TokenTree:
        if not late:
            for count in (1, 6):
                settings = SamplingParams(max_new_tokens=count, temperature=0.7, seed=count, ignore_eos=True)
                late.append(engine.submit(Request([7, 8, 9], settings), stream=True))
        return propose(context, ask)

    monkeypatch.setattr(drafter, "propose", proposes)
    settings = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)
    first = engine.submit(Request([3, 4, 5], settings))
    engine.step()
    assert late[0].future.done()
    assert (len(engine.scheduler.active), engine.state().row_steps) == (2, 3)
    finish(engine)
    assert first.result(0).token_ids == generate_reference(tiny_base.model, [3, 4, 5], 8)
    for handle in late:
        (alone,) = plainly(tiny_base, [handle.request])
        assert handle.result(0).token_ids == alone.token_ids


def test_a_step_reads_no_more_of_prompts_because_it_drafts(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 8)
    engine = Engine(
        tiny_base, AdversarialDrafter(0), SpellingTokenizer(), EngineConfig(max_num_seqs=4, num_draft_tokens=4)
    )
    settings = SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine.submit(Request([5], settings), stream=True)
    engine.step()
    for first in (7, 9):
        engine.submit(Request(list(range(first, first + 33)), settings))
    read = []
    for _ in range(8):
        before = engine.state().prefilled_tokens
        engine.step()
        read.append(engine.state().prefilled_tokens - before)
    assert read == [8] * 8
    finish(engine)


class Silent(PlainDecoding):
    """Has a tree of padding for each row."""

    spec = DraftSpec(max_nodes=8, max_depth=8)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        padding = torch.full((len(context.tokens), 1, ask.nodes), PAD_TOKEN)
        return from_paths(context.pending, padding, torch.full(padding.shape, -torch.inf), ask.nodes + 1)


def test_a_row_without_drafts_is_verified_as_a_plain_step(
    monkeypatch: pytest.MonkeyPatch, tiny_base: BaseModel
) -> None:
    sizes = []
    verify = DeviceStep.verify

    def noted(step: DeviceStep, tree: TokenTree, kv_length: int) -> Verified:
        sizes.append(tree.size)
        return verify(step, tree, kv_length)

    monkeypatch.setattr(DeviceStep, "verify", noted)
    request = Request(list(range(10, 40)), SamplingParams(1, ignore_eos=True))
    run_engine(tiny_base, Silent(), [request], max_num_seqs=1, num_draft_tokens=8)
    assert sizes == [1]


def test_no_more_draft_tokens_than_can_be_emitted(tiny_base: BaseModel) -> None:
    """Neither where one token is wanted nor near a row's end; a row that has longer to go has its own."""
    prompts = random_prompts(3, seed=6)
    plain = [
        Request(prompt, SamplingParams(count, ignore_eos=True))
        for prompt, count in zip(prompts, (1, 4, 30), strict=True)
    ]
    expected = run_engine(tiny_base, PlainDecoding(), plain)
    oracle = OracleDrafter(texts_of(plain, expected))
    found = run_engine(tiny_base, oracle, plain, num_draft_tokens=10, max_num_seqs=3)
    assert tokens_of(found) == tokens_of(expected)
    drafted = [one.counts.num_draft_tokens for one in found]
    assert drafted[0] == 0
    assert drafted[1] <= 3 + 2 + 1
    assert drafted[2] > 20
    (alone,) = run_engine(tiny_base, AdversarialDrafter(seed=1), [plain[0]], num_draft_tokens=10)
    assert (alone.token_ids, alone.counts.num_draft_tokens) == (expected[0].token_ids, 0)


@pytest.mark.parametrize("drafts", [0, 6])
def test_short_prompts_are_read_together(tiny_base: BaseModel, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are slots in one forward, though each row leaves after one token."""
    read: list[int] = []
    reads = BatchState.read

    def counted(state: BatchState, first: int, spans: Sequence[slice], *rest: Any) -> None:
        read.append(len(spans))
        reads(state, first, spans, *rest)

    monkeypatch.setattr(BatchState, "read", counted)
    requests = [Request([5 + row, 6, 7], SamplingParams(1)) for row in range(40)]
    run_engine(tiny_base, AdversarialDrafter(0), requests, max_num_seqs=8, num_draft_tokens=drafts)
    assert read == [8] * 5
