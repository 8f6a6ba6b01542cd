from __future__ import annotations

import asyncio
import gc
import multiprocessing
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from drafter import EngineConfig, EngineError, LoadError, Request, RequestError, SamplingParams, SpeculativeLM
from drafter.drafters.contract import PlainDecoding
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.handle import Handle
from drafter.llm import Prompt
from drafter.prompt_kinds import as_chat
from drafter.requests import TokenDelta
from drafter.target_model.model import BaseModel
from drafter.text.conversation import Conversation
from tests.support.models import AdversarialDrafter, SpellingTokenizer, random_model, tokens_of
from tests.support.waiting import PATIENCE, wait_until

QUESTION = "Tom has 3 boxes of 12 pens. He gives 5 pens away. How many pens does he have left?"


@pytest.fixture(scope="module")
def lm() -> Iterator[SpeculativeLM]:
    # A fixed number of draft tokens: whether they pay depends on what else the machine does.
    with SpeculativeLM.from_pretrained(device="cpu", config=EngineConfig(4, num_draft_tokens=7)) as loaded:
        yield loaded


def test_the_embedded_model_gives_generates_tokens(lm: SpeculativeLM) -> None:
    prompts: list[Prompt] = [[{"role": "user", "content": QUESTION}], "Janet has 7 ducks."]
    found = lm.generate(prompts, max_new_tokens=40)
    for one, prompt in zip(found, prompts, strict=True):
        ids = lm.encode(prompt)
        assert isinstance(ids, list)
        expected = lm.base.model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :]
        assert one.token_ids == expected.tolist()
        assert one.text == lm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
    assert sum(one.counts.num_accepted_draft_tokens for one in found) > 0


def test_requests_may_come_from_many_threads(lm: SpeculativeLM) -> None:
    ids = lm.encode(QUESTION)
    expected = lm.submit(Request(ids, SamplingParams(max_new_tokens=12))).result(60).token_ids
    found: list[list[int]] = []

    def ask() -> None:
        found.append(lm.submit(Request(ids, SamplingParams(max_new_tokens=12))).result(60).token_ids)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 12


def test_requests_may_be_awaited(lm: SpeculativeLM) -> None:
    """Streams and results of many requests in one loop; a task that stops waiting takes nothing with it."""
    ids = lm.encode([{"role": "user", "content": QUESTION}])
    settings = SamplingParams(max_new_tokens=20)
    expected = lm.submit(Request(ids, settings)).result(60)

    async def read(handle: Handle) -> list[TokenDelta]:
        return [delta async for delta in handle]

    async def talk() -> None:
        streams = [lm.submit(Request(ids, settings), stream=True) for _ in range(9)]
        silent = lm.submit(Request(ids, settings))
        impatient = asyncio.create_task(silent.outcome())
        await asyncio.sleep(0)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        for stream, deltas in zip(streams, await asyncio.gather(*map(read, streams)), strict=True):
            assert "".join(delta.text for delta in deltas) == expected.text
            assert (await stream.outcome()).token_ids == expected.token_ids
        assert (await silent.outcome()).token_ids == expected.token_ids

    asyncio.run(talk())


def endless(lm: SpeculativeLM) -> Handle:
    return lm.stream(QUESTION, max_new_tokens=900, ignore_eos=True)


def test_a_stream_that_is_left_frees_its_slot(lm: SpeculativeLM) -> None:
    handles = [endless(lm) for _ in range(3)]
    for _ in handles[0]:
        break
    with suppress(ZeroDivisionError):
        for _ in handles[1]:
            raise ZeroDivisionError
    iterator = iter(handles[2])
    next(iterator)
    assert not handles[2].cancelled
    del iterator
    for handle in handles:
        assert handle.result(PATIENCE).finish_reason == "cancelled"
    whole = lm.stream(QUESTION, max_new_tokens=4, ignore_eos=True)
    assert len([token for delta in whole for token in delta.token_ids]) == 4
    assert (whole.cancelled, whole.result(PATIENCE).finish_reason) == (False, "length")


def test_an_asyncio_stream_that_is_left_frees_its_slot(lm: SpeculativeLM) -> None:
    async def read(handle: Handle) -> None:
        async for _ in handle:
            pass

    async def first(handle: Handle) -> TokenDelta:
        async for delta in handle:
            return delta
        raise AssertionError

    async def talk() -> None:
        handles = [endless(lm) for _ in range(4)]
        assert (await first(handles[0])).token_ids
        task = asyncio.create_task(read(handles[1]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for waits in (read(handles[2]), handles[3].outcome()):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waits, 0.01)
        for handle in handles:
            assert (await handle.outcome()).finish_reason == "cancelled"

    asyncio.run(talk())


def test_a_listener_whose_loop_closes_harms_nobody(lm: SpeculativeLM) -> None:
    handle = endless(lm)

    async def first() -> TokenDelta:
        return await anext(aiter(handle))

    assert asyncio.run(first()).token_ids
    assert handle.result(PATIENCE).finish_reason == "cancelled"
    assert len(lm.generate(QUESTION, max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3


def test_what_takes_long_at_the_start_is_logged_or_shown_on_a_terminal(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("INFO", "drafter"), SpeculativeLM.from_pretrained(drafter="ngram", device="cpu"):
        said = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in said] == ["loading", "proving", "timing"]
    assert "proving" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with SpeculativeLM.from_pretrained(drafter="ngram", device="cpu"):
        assert capsys.readouterr().err.splitlines() == [f"{line} …" for line in said]


def test_an_interrupted_call_leaves_nothing_in_the_engine(lm: SpeculativeLM) -> None:
    """Its 400 prompts would be decoded for minutes, and the next call would wait for them."""

    def interrupt() -> None:
        wait_until(lambda: lm.engine.state().waiting > 300 and lm.engine.state().active, "the call is under way")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever starts tests may ignore it
    gc.disable()  # an interrupt within a function that the collector calls, as other tests have it do, is lost
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            lm.generate([QUESTION] * 400, max_new_tokens=900, ignore_eos=True)
        thread.join()
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, handler)
    before = lm.engine.state().output_tokens
    assert len(lm.generate(QUESTION, max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3
    assert lm.engine.state().waiting == 0
    assert lm.engine.state().output_tokens - before < 400


def test_a_failed_stream_ends_and_says_why() -> None:
    async def read(broken: SpeculativeLM) -> None:
        endless = Request([5], SamplingParams(max_new_tokens=900, ignore_eos=True))
        handle = broken.submit(endless, stream=True)
        async for _ in handle:
            broken.close()
        await handle.outcome()

    broken = SpeculativeLM.from_pretrained(drafter="none", device="cpu", config=EngineConfig(max_num_seqs=1))
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(read(broken))


def test_what_may_not_be_chosen(lm: SpeculativeLM) -> None:
    """With the tokeniser's own words; streams, stop strings and log-probabilities go on as they do without."""
    (free,) = lm.chat(QUESTION, max_new_tokens=40, logprobs=1)
    word = next(one for one in free.text.split() if one.isalpha() and len(one) > 2)
    (without,) = lm.chat(QUESTION, max_new_tokens=40, bad_words=[word], logprobs=1)
    assert word in free.text
    assert word not in without.text
    place = next(at for at, (a, b) in enumerate(zip(free.token_ids, without.token_ids, strict=False)) if a != b)
    assert free.logprobs is not None
    assert without.logprobs is not None
    # The target model's own, before the word is forbidden.
    assert without.logprobs[place].top[0][0] == free.token_ids[place]
    assert without.logprobs[place].logprob < without.logprobs[place].top[0][1]  # type: ignore[operator]

    end = next(iter(lm.base.eos_token_ids))
    stop = free.text[3:6]
    longer = lm.submit(
        Request(lm.encode(as_chat(QUESTION)), SamplingParams(60, min_tokens=60, stop=(stop,))), stream=True
    )
    text = "".join(delta.text for delta in longer)
    found = longer.result(PATIENCE)
    assert (len(found.token_ids), found.finish_reason, found.text) == (60, "length", text)
    assert end not in found.token_ids
    assert stop in text
    digits = [token for token in range(lm.base.vocab_size) if lm.tokenizer.decode([token]).strip().isdigit()]
    (number,) = lm.chat(QUESTION, max_new_tokens=9, allowed_token_ids=[*digits, end])
    assert number.text.replace(" ", "").isdigit()


def test_wrong_use_is_named(lm: SpeculativeLM, tmp_path: Path) -> None:
    for name, ours in (
        ("max_tokens", "max_new_tokens"),
        ("stream", "SpeculativeLM.stream"),
        ("temprature", "temperature"),
        ("min_new_tokens", "min_tokens"),
    ):
        with pytest.raises(RequestError, match=f"unknown setting {name}: use {ours}"):
            lm.generate("x", **cast(Any, {name: 5}))
    with pytest.raises(RequestError, match="submit takes a Request, not 'Tom'"):
        lm.submit("Tom")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="the sampling of a Request must be SamplingParams"):
        Request([5], {"max_new_tokens": 5})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="message 1"):
        lm.generate([[{"rôle": "user"}]], on_error="raise")
    with pytest.raises(LoadError, match="no drafter 'medusae'"):
        SpeculativeLM.from_pretrained(drafter="medusae", device="cpu")
    for name, value, said in (
        ("model", 5, "model must be a folder or a hub id, not 5"),
        ("config", 5, "config must be an EngineConfig or a mapping of its fields, not 5"),
        ("verifier", 5, "verifier must be a name, VerifierSettings or a mapping of its fields, not 5"),
        ("verifier", {"nam": "x"}, "verifier: unknown setting nam: use name"),
        ("torch_dtype", "x", "unknown setting torch_dtype: use dtype"),
    ):
        with pytest.raises(LoadError, match=said):
            SpeculativeLM.from_pretrained(**cast(Any, {name: value}))
    with pytest.raises(LoadError, match="nowhere': there is no such folder"):
        SpeculativeLM.from_pretrained(tmp_path / "nowhere")
    random_model("llama").save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="belongs to the target model"):
        SpeculativeLM.from_pretrained(tmp_path, drafter="ctc", device="cpu")


def test_a_model_that_is_used_no_more_is_freed_once_its_requests_have_ended() -> None:
    """As when a notebook's cell is run again."""
    base, before = BaseModel(random_model("llama"), native=False), threading.active_count()
    config = EngineConfig(max_num_seqs=2, max_model_len=64, num_draft_tokens=3)
    lm = SpeculativeLM(base, AdversarialDrafter(0, nodes=3), SpellingTokenizer(), config)
    handles = [lm.stream([5, 6, 7], max_new_tokens=40, ignore_eos=True) for _ in range(3)]
    left = weakref.ref(base), weakref.ref(lm), weakref.ref(lm.engine)
    assert threading.active_count() == before + 1
    del base, lm
    assert [len(handle.result(PATIENCE).token_ids) for handle in handles] == [40] * 3
    del handles

    def freed() -> bool:
        gc.collect()
        return [one() for one in left] == [None] * 3 and threading.active_count() == before

    wait_until(freed, "the model to be gone")


def test_a_forked_child_is_told_at_once(lm: SpeculativeLM) -> None:
    """Its copy of the engine has no thread: a request would wait for ever."""

    async def first() -> None:
        async for _ in lm.stream(QUESTION):
            pass

    def child() -> None:
        for use in (
            lambda: lm.generate(QUESTION),
            lambda: lm.chat(QUESTION),
            lambda: lm.stream(QUESTION),
            lambda: asyncio.run(first()),
        ):
            with pytest.raises(EngineError, match="loaded in another process, of which this one is a fork"):
                use()
        lm.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(PATIENCE)
    try:
        assert process.exitcode == 0
    finally:
        process.kill()
    assert lm.generate(QUESTION, max_new_tokens=3, ignore_eos=True)[0].text


def test_a_closed_engine_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    lm = SpeculativeLM.from_pretrained(EMBEDDED_BASE, drafter="none", device="cpu", config=EngineConfig(max_num_seqs=1))
    handle = lm.submit(Request([5], SamplingParams(max_new_tokens=900, ignore_eos=True)))
    lm.close()
    with pytest.raises(EngineError, match="closed"):
        handle.result(1)
    with pytest.raises(EngineError, match="the engine is closed: load the model again"):
        lm.submit(Request([5]))
    assert not capfd.readouterr().err  # not even a progress bar of transformers


@pytest.mark.slow
def test_a_script_may_end_in_the_middle_of_a_step() -> None:
    """Without closing anything. A step takes so long here that the end always comes inside of one."""
    script = """
import atexit
import threading
from drafter import Request, SamplingParams, SpeculativeLM

lm = SpeculativeLM.from_pretrained(drafter="none", device="cpu")
in_step, step = threading.Event(), lm.engine.step

def long_step():
    in_step.set()
    for _ in range(50):
        step()

lm.engine.step = long_step
handle = lm.submit(Request(lm.encode("Tom has 3 boxes"), SamplingParams(max_new_tokens=200)))
atexit.register(in_step.wait)  # what is registered last is called first
atexit.register(lambda: print("the script has ended"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the script has ended\n"


def column_kinds(ids: list[list[int]], texts: list[str]) -> dict[str, object]:
    return {
        "list": texts,
        "tuple": tuple(texts),
        "generator": (text for text in texts),
        "NumPy": np.array(texts),
        "pandas": pd.Series(texts, index=[7, 3]),
        "Arrow": pa.chunked_array([texts[:1], texts[1:]]),
        "lists of ids": ids,
        "tuples of ids": tuple(map(tuple, ids)),
        "arrays of ids": [np.array(one) for one in ids],
        "tensors of ids": [torch.tensor(one) for one in ids],
        "Arrow's lists of ids": pa.array(ids),
        "Arrow's scalars": list(pa.array(texts)),
        "numbers of NumPy": [list(np.array(one)) for one in ids],
    }


def test_prompts_come_in_any_container(lm: SpeculativeLM) -> None:
    texts = ["Janet has 7 ducks.", "12 + 12 ="]
    ids = [lm.encode(text) for text in texts]
    expected = tokens_of(lm.generate(texts, max_new_tokens=8))
    for kind, prompts in column_kinds(ids, texts).items():
        found = lm.generate(prompts, max_new_tokens=8)  # type: ignore[arg-type]
        assert tokens_of(found) == expected, kind
        assert [one.request_id for one in found] == ["0", "1"]
    for single in (texts[0], ids[0], tuple(ids[0]), np.array(ids[0]), list(np.array(ids[0])), np.array(texts[0])):
        assert tokens_of(lm.generate(single, max_new_tokens=8)) == expected[:1]
    (ranged,), (listed,) = lm.generate(range(5, 9), max_new_tokens=8), lm.generate([5, 6, 7, 8], max_new_tokens=8)
    assert ranged.token_ids == listed.token_ids
    assert lm.generate([]) == []


def test_a_text_is_the_users_message_in_a_chat(lm: SpeculativeLM) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    (expected,) = lm.generate([messages], max_new_tokens=20)
    for conversations in (QUESTION, messages, [QUESTION], [messages], pa.array([QUESTION])):
        (found,) = lm.chat(conversations, max_new_tokens=20)
        assert found.token_ids == expected.token_ids
        assert found.text
    asked = [*messages, {"role": "assistant", "content": "It is"}]
    continued, begun = (
        lm.chat(asked, continue_final_message=continues, max_new_tokens=4)[0] for continues in (None, False)
    )
    ids = lm.encode(asked)
    assert isinstance(ids, list)
    assert continued.num_prompt_tokens == len(ids) == begun.num_prompt_tokens - 2
    assert (
        lm.generate(Conversation(asked, add_generation_prompt=True), max_new_tokens=4)[0].token_ids == begun.token_ids
    )

    def add(x: int) -> int:
        """Add one.

        Args:
            x: A number.
        """
        return x + 1

    for given in ({"tools": [add]}, {"documents": [{"text": "a"}]}, {"chat_template_kwargs": {"thinking": True}}):
        (refused,) = lm.chat(QUESTION, **given)
        assert refused.error is not None
        assert "the chat template does not take these messages: it reads no" in refused.error
    (bad,) = lm.chat([None], max_new_tokens=20)  # type: ignore[arg-type]
    assert bad.error == "a conversation must be a text or a list of messages, not None"


def test_parts_of_text_are_lines_of_a_message_and_other_parts_are_refused(lm: SpeculativeLM) -> None:
    def message(*parts: Any) -> dict[str, Any]:
        return {"role": "user", "content": list(parts)}

    first, second = ({"type": "text", "text": text} for text in ("2 + 3", "= ?"))
    assert lm.encode([message(first, second)]) == lm.encode([{"role": "user", "content": "2 + 3\n= ?"}])
    (audio, none) = lm.chat([[message(first, {"type": "audio"})], [{"role": "user", "content": None}]])
    assert audio.error == "message 1 has a part of type 'audio': only text and images are read"
    assert none.error == "message 1 has no content"


def test_bad_prompts_are_results_and_cost_the_others_nothing(lm: SpeculativeLM) -> None:
    prompts: list[Any] = ["12 + 12 =", "", None, [10**9], [{"rôle": "user"}], [5] * 10_000, "1 + 1 ="]
    found = lm.generate(prompts, max_new_tokens=4)
    errors = ["prompt is empty", "not None", "outside the vocabulary", "message 1", "10000 tokens"]
    assert [one.finish_reason for one in found[1:-1]] == ["error"] * 5
    for one, words in zip(found[1:-1], errors, strict=True):
        assert one.error is not None
        assert words in one.error
        assert (one.text, one.token_ids) == ("", [])
    good = lm.generate(["12 + 12 =", "1 + 1 ="], max_new_tokens=4)
    assert [found[0].token_ids, found[-1].token_ids] == tokens_of(good)
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        lm.generate(prompts, max_new_tokens=4, on_error="raise")
    for whole in (5, {"prompt": "x"}, b"x"):
        with pytest.raises(RequestError, match="prompts must be a text, a list of token ids"):
            lm.generate(whole)  # type: ignore[arg-type]
    for table in (pd.DataFrame({"prompt": ["x"]}), pa.table({"prompt": ["x"]})):
        with pytest.raises(RequestError, match="prompts must be one column of the"):
            lm.generate(table)
    with pytest.raises(RequestError, match="on_error must be return or raise, not 'ignore'"):
        lm.generate("x", on_error="ignore")  # type: ignore[arg-type]


def test_samples_and_equal_prompts_differ_and_are_the_same_again(lm: SpeculativeLM) -> None:
    settings: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 12, "seed": 4, "ignore_eos": True}
    first = lm.generate([QUESTION, QUESTION], n=3, **settings)
    assert [one.request_id for one in first] == ["0#0", "0#1", "0#2", "1#0", "1#1", "1#2"]
    assert len({tuple(one.token_ids) for one in first}) == 6
    again = lm.generate([QUESTION, QUESTION], n=3, **settings)
    assert tokens_of(again) == tokens_of(first)
    (alone,) = lm.generate(QUESTION, **settings)
    assert alone.token_ids == first[0].token_ids
    for wrong in (0, True, "3"):
        with pytest.raises(RequestError, match="n must be an integer"):
            lm.generate(QUESTION, n=wrong)  # type: ignore[arg-type]


def test_each_prompt_may_have_settings_of_its_own(lm: SpeculativeLM) -> None:
    settings = [SamplingParams(max_new_tokens=2), SamplingParams(temperature=1.5, seed=9, max_new_tokens=5)]
    found = lm.generate([QUESTION, QUESTION], settings, ignore_eos=True)
    assert [len(one.token_ids) for one in found] == [2, 5]
    (alone,) = lm.generate(QUESTION, settings[1], ignore_eos=True)
    assert found[1].token_ids == alone.token_ids
    with pytest.raises(RequestError, match="prompt 2 has no settings"):
        lm.generate([QUESTION] * 3, settings)
    with pytest.raises(RequestError, match="more settings than the 1 prompts"):
        lm.generate(QUESTION, settings)
    given: list[Any] = [{"max_new_tokens": np.int64(2)}, {"temperature": np.float32(1.5), "seed": 9, "stop": None}]
    for one, same in zip(lm.generate([QUESTION, QUESTION], given, ignore_eos=True), found, strict=True):
        assert one.token_ids[:5] == same.token_ids
    for wrong in (5, [5], "Tom", [SamplingParams(), None, "Tom"]):
        with pytest.raises(RequestError, match="sampling must be SamplingParams, a mapping of its fields"):
            lm.generate([QUESTION] * 3, wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="unknown setting max_tokens: use max_new_tokens"):
        lm.generate(QUESTION, {"max_tokens": 5})
    with pytest.raises(RequestError, match="unknown setting max_tokens: use max_new_tokens"):
        SamplingParams(max_tokens=5)  # type: ignore[call-arg]


def test_results_come_as_they_are_done_and_are_cancelled_with_the_iterator(lm: SpeculativeLM) -> None:
    lengths = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (200, 2)]
    assert [one.request_id for one in lm.as_completed([QUESTION, QUESTION], lengths)] == ["1", "0"]
    lengths = [SamplingParams(count, ignore_eos=True) for count in (2, *[900] * 40)]
    results = lm.as_completed([QUESTION] * 41, lengths)
    assert next(results).request_id == "0"
    with pytest.raises(RequestError, match="unknown setting"):
        lm.as_completed(QUESTION, colour="red")
    results.close()
    assert list(results) == []

    async def talk() -> None:
        found = {one.request_id: one.token_ids async for one in lm.as_completed([QUESTION] * 3, max_new_tokens=5)}
        assert sorted(found) == ["0", "1", "2"]
        endless = lm.as_completed([QUESTION] * 20, max_new_tokens=900, ignore_eos=True)
        waiting = asyncio.ensure_future(anext(endless))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(talk())
    assert len(lm.generate(QUESTION, max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3


def test_a_stream_is_iterated_over_or_awaited(lm: SpeculativeLM) -> None:
    (expected,) = lm.generate(QUESTION, max_new_tokens=12)
    assert "".join(delta.text for delta in lm.stream(QUESTION, max_new_tokens=12)) == expected.text

    async def talk() -> None:
        text = "".join([delta.text async for delta in lm.stream(QUESTION, max_new_tokens=12)])
        assert text == expected.text
        found = await asyncio.gather(*(lm.stream(QUESTION, max_new_tokens=12) for _ in range(3)))
        assert tokens_of(found) == [expected.token_ids] * 3

    asyncio.run(talk())
    handle = lm.stream(QUESTION, max_new_tokens=4)
    assert [bool(list(handle)), list(handle)] == [True, []]


def test_settings_have_the_names_of_columns_and_of_other_libraries(
    lm: SpeculativeLM, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = lm.generate(QUESTION, stop="a", max_new_tokens=100_000)
    assert "a" not in found.text
    assert "max_new_tokens 100000 is more than there is room for" in caplog.text
    caplog.clear()
    (refused,) = lm.generate([[5] * 100_000], max_new_tokens=2)
    assert refused.error is not None
    assert not caplog.text  # the error says it
    assert found.num_prompt_tokens == len(lm.encode(QUESTION))
    counts = found.counts
    assert found.mean_acceptance_length == counts.num_output_tokens / counts.num_decode_steps
    capsys.readouterr()
    lm.generate([QUESTION, QUESTION], max_new_tokens=2)
    assert not capsys.readouterr().err
    lm.generate([QUESTION, QUESTION], max_new_tokens=2, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_a_model_is_pickled_as_what_loads_it() -> None:
    with SpeculativeLM.from_pretrained(drafter="none", device="cpu", max_num_seqs=3, config={"kv_gib": 0.1}) as lm:
        assert (lm.engine.config.max_num_seqs, lm.engine.config.kv_gib) == (3, 0.1)
        with pickle.loads(pickle.dumps(lm)) as other:
            assert other.engine.config == lm.engine.config
            assert other.generate(QUESTION, max_new_tokens=4)[0].text == lm.generate(QUESTION, max_new_tokens=4)[0].text
        with (
            SpeculativeLM(lm.base, PlainDecoding(), lm.tokenizer) as made,
            pytest.raises(TypeError, match="make it by from_pretrained"),
        ):
            pickle.dumps(made)
    with pytest.raises(LoadError, match="unknown setting max_num_seq: use max_num_seqs"):
        SpeculativeLM.from_pretrained(max_num_seq=3)
    with pytest.raises(LoadError, match="max_num_seqs must be at least 1"):
        SpeculativeLM.from_pretrained(config={"max_num_seqs": 0})
