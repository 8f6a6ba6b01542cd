"""Lossless is the product: every drafter and every setting of the engine gives plain decoding's tokens, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import cache
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from transformers import AddedToken

from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.drafters.merged import ChoosingDrafter, MergedDrafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.heads import make_head
from tests.support.marks import slow_but, slow_but_tuples
from tests.support.models import (
    FAMILIES,
    AdversarialDrafter,
    OracleDrafter,
    SpellingTokenizer,
    generate_reference,
    plainly,
    random_model,
    random_prompts,
    run_engine,
)

NEW_TOKENS = 24
MAIN_FAMILIES = ("llama", "gemma2", "gpt2", "gpt_oss", "llama4_text")
"""Families that differ most: full, sliding and chunked attention, learned positions, attention sinks, experts."""
SOME_FAMILIES = ("llama", "gemma2", "gpt2", "mistral")

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 10},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.8, "temperature": 0.8},
    {"frequency_penalty": 2.0, "logit_bias": {5: 4.0, 6: 4.0, 7: -100.0}},
    {"min_tokens": 9, "stop_token_ids": list(range(40)), "bad_words": ["50", "41 42"]},
    {"min_tokens": 4, "allowed_token_ids": list(range(0, 97, 5)), "bad_words": ["5 5", "10"], "temperature": 1.0},
    {},
]


@cache
def base_of(family: str) -> BaseModel:
    return BaseModel(random_model(family))


MakeDrafters = Callable[[BaseModel, list[list[int]]], dict[str, Drafter]]
"""Makes drafters for a base, by name, of which some may know texts that will be decoded."""


def drafters(base: BaseModel, texts: list[list[int]]) -> dict[str, Drafter]:
    head, lattice = (make_head(base, kind).drafter(base, 8) for kind in ("ctc", "context 2"))
    return {
        "none": PlainDecoding(),
        "adversarial": AdversarialDrafter(seed=1),
        "oracle": OracleDrafter(texts),
        "ensemble": MergedDrafter(AdversarialDrafter(seed=2), OracleDrafter(texts)),
        "heads": MergedDrafter(head, lattice),
        "choosing": ChoosingDrafter({"head": make_head(base, "ctc").drafter(base, 8), "oracle": OracleDrafter(texts)}),
    }


every_family = pytest.mark.parametrize(
    ("family", "whole"),
    slow_but_tuples(product(MAIN_FAMILIES, [False]), [*product(MAIN_FAMILIES, [False]), *product(FAMILIES, [True])]),
)
some_families = pytest.mark.parametrize(
    ("family", "whole"), slow_but_tuples([("llama", False)], [("llama", False), *product(SOME_FAMILIES, [True])])
)
"""In the fast suite a drafter meets two of the main families, and one batch size; all of them in the whole one."""


@cache
def greedy(family: str, count: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what `generate` says to them."""
    prompts = random_prompts(count, seed)
    return prompts, [generate_reference(base_of(family).model, prompt, NEW_TOKENS) for prompt in prompts]


def check_greedy(family: str, drafters: MakeDrafters, rarely_right: Container[str], *, whole: bool) -> None:
    """Check greedy tokens against `generate`; all drafters but those that are `rarely_right` have some accepted."""
    base = base_of(family)
    prompts, expected = greedy(family, 6, len(family))
    requests = [Request(prompt, SamplingParams(max_new_tokens=NEW_TOKENS)) for prompt in prompts]
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    for number, (name, drafter) in enumerate(drafters(base, texts).items()):
        if not whole and (number - MAIN_FAMILIES.index(family)) % len(MAIN_FAMILIES) not in (0, 2):
            continue
        # Three slots for six requests: slots are refilled while others decode.
        found = run_engine(base, drafter, requests, max_num_seqs=3, num_draft_tokens=10)
        assert [one.token_ids for one in found] == expected, name
        accepted = sum(one.counts.num_accepted_draft_tokens for one in found)
        assert accepted > 0 or name in rarely_right


@every_family
def test_greedy_equals_generate(family: str, whole: bool) -> None:
    check_greedy(family, drafters, rarely_right=("none", "adversarial", "heads", "choosing"), whole=whole)


@pytest.mark.parametrize("family", slow_but(("llama",), ("llama", "gpt_oss")))
def test_the_default_dtype_has_no_part_in_it(family: str) -> None:
    """transformers changes it for the whole process while another thread loads a model in bf16."""
    model, prompts = random_model(family), random_prompts(6, seed=len(family))
    expected = [generate_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    requests = [Request(prompt, SamplingParams(max_new_tokens=NEW_TOKENS)) for prompt in prompts]
    heads = [make_head(base_of(family), kind) for kind in ("ctc", "context 2", "eagle3")]
    torch.set_default_dtype(torch.bfloat16)
    try:
        base = BaseModel(model)  # what it keeps of the model is made here, too
        oracle = OracleDrafter([prompt + text for prompt, text in zip(prompts, expected, strict=True)])
        for drafter in (oracle, *(head.drafter(base, 8) for head in heads)):
            found = run_engine(base, drafter, requests, max_num_seqs=3, num_draft_tokens=10)
            assert [one.token_ids for one in found] == expected, drafter
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", slow_but(MAIN_FAMILIES, FAMILIES))
def test_prompts_that_begin_alike_are_read_once(family: str) -> None:
    """Some prompts are the same, some go on differently; the beginning is longer than any window or chunk."""
    base = base_of(family)
    beginning = [3 + place * 7 % 90 for place in range(21)]
    ends = [[], [5, 6], [5, 7, 8, 9], [], [9] * 11, [5, 6]]
    requests = [
        Request(beginning + end, SamplingParams(8 + row, temperature=row % 2, seed=row, presence_penalty=0.5))
        for row, end in enumerate(ends)
    ]
    expected = plainly(base, requests)  # alone: nobody to share with
    texts = [[*r.prompt_ids, *one.token_ids] for r, one in zip(requests, expected, strict=True)]
    engine = Engine(base, OracleDrafter(texts), SpellingTokenizer(), EngineConfig(max_num_seqs=4, num_draft_tokens=10))
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
    assert [handle.result(0).token_ids for handle in handles] == [one.token_ids for one in expected]
    state = engine.state()
    assert state.shared_tokens >= 3 * 20  # of those that enter together
    assert state.shared_tokens + state.prefilled_tokens == sum(len(r.prompt_ids) - 1 for r in requests)


@pytest.mark.parametrize("family", slow_but(["gemma2"], ["llama", "gemma2", "llama4_text"]))
def test_prompts_that_are_read_in_pieces_while_others_are_decoded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end, and move, while a prompt is read behind them; some prompts begin like it."""
    monkeypatch.setattr("drafter.engine.scheduler.CHUNK", 4)
    base = base_of(family)
    prompts = random_prompts(11, seed=12)
    prompts[::3] = [list(range(10, 40)) + prompt for prompt in prompts[::3]]
    requests = [
        Request(prompt, SamplingParams(5 + row % 7, temperature=row % 2, seed=row, frequency_penalty=0.5))
        for row, prompt in enumerate(prompts)
    ]
    expected = plainly(base, requests)
    made = drafters(base, [[*r.prompt_ids, *one.token_ids] for r, one in zip(requests, expected, strict=True)])
    for name in ("oracle", "heads"):
        engine = Engine(base, made[name], SpellingTokenizer(), EngineConfig(max_num_seqs=4, num_draft_tokens=10))
        handles = [engine.submit(request, stream=True) for request in requests]
        while not engine.idle:
            engine.step()
        assert [handle.result(0).token_ids for handle in handles] == [one.token_ids for one in expected], name


SIZES = list(product([1, 2, 5, 16], [0, 3, 10, "auto"]))
"""Slots, and draft nodes a step."""


@pytest.mark.parametrize(("slots", "nodes"), slow_but_tuples([(1, 10), (2, 0), (5, "auto"), (16, 3)], SIZES))
def test_greedy_is_the_same_at_every_batch_and_tree_size(slots: int, nodes: Any) -> None:
    base = base_of("llama")
    prompts, expected = greedy("llama", 17, 3)
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    requests = [Request(prompt, SamplingParams(max_new_tokens=NEW_TOKENS)) for prompt in prompts]
    for drafter in (OracleDrafter(texts), AdversarialDrafter(seed=2)):
        found = run_engine(base, drafter, requests, max_num_seqs=slots, num_draft_tokens=nodes)
        assert [one.token_ids for one in found] == expected


def check_sampled(family: str, drafters: MakeDrafters, *, whole: bool) -> None:
    base = base_of(family)
    prompts = random_prompts(14, seed=5)
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=NEW_TOKENS, seed=seed, **SETTINGS[seed % len(SETTINGS)]))
        for seed, prompt in enumerate(prompts)
    ]
    expected = [plainly(base, [request])[0].token_ids for request in requests]
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    for number, (name, drafter) in enumerate(drafters(base, texts).items()):
        some = slice(number % 4, None, 4)  # alone takes long: each request is, with a part of the drafters
        alone = run_engine(base, drafter, requests[some], max_num_seqs=1, num_draft_tokens=10)
        assert [one.token_ids for one in alone] == expected[some], name
        batches = [(6, 1), (14, -1)]
        for slots, order in batches if whole else batches[number % 2 :][:1]:
            found = run_engine(base, drafter, requests[::order], max_num_seqs=slots, num_draft_tokens=10)[::order]
            assert [one.token_ids for one in found] == expected, (name, slots)


@some_families
def test_sampled_tokens_are_a_function_of_the_seed(family: str, whole: bool) -> None:
    check_sampled(family, drafters, whole=whole)


def check_log_probabilities(drafters: MakeDrafters) -> None:
    base = base_of("gemma2")
    prompts = random_prompts(6, seed=8)
    requests = [
        Request(p, SamplingParams(NEW_TOKENS, temperature=row % 2, seed=row, logprobs=[None, 2, 0][row % 3]))
        for row, p in enumerate(prompts)
    ]
    expected = plainly(base, requests)
    texts = [prompt + one.token_ids for prompt, one in zip(prompts, expected, strict=True)]
    for name, drafter in drafters(base, texts).items():
        for found, plain in zip(
            run_engine(base, drafter, requests, max_num_seqs=4, num_draft_tokens=10), expected, strict=True
        ):
            assert (found.logprobs is None) == (plain.logprobs is None), name
            for one, other in zip(found.logprobs or (), plain.logprobs or (), strict=True):
                assert (one.token_id, [t for t, _ in one.top]) == (other.token_id, [t for t, _ in other.top])
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


def test_log_probabilities_do_not_depend_on_the_drafter() -> None:
    check_log_probabilities(drafters)


def test_another_seed_gives_other_tokens() -> None:
    base = base_of("llama")
    requests = [Request([5, 6], SamplingParams(max_new_tokens=16, temperature=1.0, seed=seed)) for seed in range(4)]
    found = run_engine(base, PlainDecoding(), requests, max_num_seqs=4)
    assert len({tuple(one.token_ids) for one in found}) == 4


def test_the_end_cuts_where_plain_decoding_ends() -> None:
    """The end of sequence, stop strings and the limit, hit in the middle of an accepted run."""
    base = base_of("llama")
    prompts = random_prompts(8, seed=9)
    free = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    texts = [
        one.token_ids for one in run_engine(base, PlainDecoding(), [Request(p, free) for p in prompts], max_num_seqs=8)
    ]
    known = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    for cut in (1, 3, 4, 7, 8, 23):
        stop = [SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, stop=(f" {t[cut]} ",)) for t in texts]
        short = SamplingParams(max_new_tokens=cut, ignore_eos=True)
        for settings in (stop, [short] * len(prompts)):
            requests = [Request(p, s) for p, s in zip(prompts, settings, strict=True)]
            expected = plainly(base, requests)
            found = run_engine(base, OracleDrafter(known), requests, max_num_seqs=3, num_draft_tokens=10)
            for one, other, text in zip(found, expected, texts, strict=True):
                assert one.token_ids == other.token_ids == text[: len(one.token_ids)]
                assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
                assert one.counts.num_output_tokens == len(one.token_ids)
                assert one.counts.num_accepted_draft_tokens + one.counts.num_decode_steps >= len(one.token_ids)


@pytest.mark.parametrize("which", [0, 1])
def test_special_tokens_end_a_text_as_stop_strings_and_by_their_ids(which: int) -> None:
    """As `generate` does with `stop_strings`, though the text leaves special tokens out."""
    base = base_of("llama")
    prompt = random_prompts(8, seed=9)[3]
    free = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    (whole,) = plainly(base, [Request(prompt, free)])
    ids = whole.token_ids
    end = [place for place, token in enumerate(ids) if place and token not in ids[:place]][which]

    class WithSpecialToken(SpellingTokenizer):
        added_tokens_decoder: ClassVar = {ids[end]: AddedToken("<turn>", special=True)}

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "".join(f" {i}" for i in ids if i not in self.added_tokens_decoder)

    text = WithSpecialToken().decode(ids[:end])
    for settings, shown in (
        ({"stop": ("<turn>",)}, text),
        ({"stop": (f"{ids[end - 1]}<turn>", "never")}, text.removesuffix(str(ids[end - 1]))),
        ({"stop_token_ids": (ids[end],)}, text),
    ):
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, **settings)
        for drafter in (PlainDecoding(), OracleDrafter([prompt + ids])):
            engine = Engine(base, drafter, WithSpecialToken(), EngineConfig(max_num_seqs=1, num_draft_tokens=10))
            handle = engine.submit(Request(prompt, sampling), stream=True)
            while not engine.idle:
                engine.step()
            found = handle.result(0)
            assert (found.token_ids, found.text, found.finish_reason) == (ids[: end + 1], shown, "stop")
            assert "".join(delta.text for delta in handle) == shown


def test_a_row_ends_at_the_slots_last_position() -> None:
    base = base_of("gpt2")  # learned positions: reading past the table would raise
    prompts = [[5, 6, 7] * 40, [8] * 126, [9]]
    requests = [Request(prompt, SamplingParams(max_new_tokens=500, ignore_eos=True)) for prompt in prompts]
    expected = plainly(base, requests)
    known = [prompt + one.token_ids for prompt, one in zip(prompts, expected, strict=True)]
    found = run_engine(base, OracleDrafter(known), requests, max_num_seqs=2, num_draft_tokens=10)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [len(prompt) + len(one.token_ids) for prompt, one in zip(prompts, found, strict=True)] == [128, 128, 128]
    assert {one.finish_reason for one in found} == {"length"}


def test_plain_decoding_is_one_token_a_forward() -> None:
    requests = [Request(prompt, SamplingParams(max_new_tokens=9)) for prompt in random_prompts(5)]
    for one in run_engine(base_of("llama"), PlainDecoding(), requests, max_num_seqs=2):
        assert one.counts.num_decode_steps == one.counts.num_output_tokens == len(one.token_ids)
        assert one.counts.num_draft_tokens == 0
