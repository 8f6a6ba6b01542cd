"""Lossless is the product: every drafter and every setting of the engine gives plain decoding's tokens, in fp32."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from transformers import AddedToken

from drafter.drafters.contract import PlainDecoding
from drafter.drafters.merged import ChoosingDrafter, MergedDrafter
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.heads import make_head
from tests.support.identity import SITUATIONS, MakeDrafter, check_identity
from tests.support.marks import pairwise, slow_but, slow_but_tuples
from tests.support.models import (
    DEVICE,
    FAMILIES,
    AdversarialDrafter,
    OracleDrafter,
    SpellingTokenizer,
    base_of,
    decode,
    engine_of,
    finish,
    generate_reference,
    plainly,
    random_model,
    random_prompts,
    run_engine,
    texts_of,
    tokens_of,
)

NEW_TOKENS = 24
MAIN_FAMILIES = ("llama", "gemma2", "gpt2", "gpt_oss", "llama4_text")
"""Families that differ most: full, sliding and chunked attention, learned positions, attention sinks, experts."""

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


MAKE: dict[str, MakeDrafter] = {
    "none": lambda base, texts: PlainDecoding(),
    "adversarial": lambda base, texts: AdversarialDrafter(seed=1),
    "oracle": lambda base, texts: OracleDrafter(texts),
    "ensemble": lambda base, texts: MergedDrafter(AdversarialDrafter(seed=2), OracleDrafter(texts)),
    "heads": lambda base, texts: MergedDrafter(
        make_head(base, "ctc").drafter(base, 8, "static"), make_head(base, "context 2", joint_size=4).drafter(base, 8)
    ),
    "eagle3": lambda base, texts: make_head(base, "eagle3").drafter(base, 8),
    "choosing": lambda base, texts: ChoosingDrafter(
        {"head": make_head(base, "ctc").drafter(base, 8), "oracle": OracleDrafter(texts)}
    ),
}
CASES = pairwise(
    13,
    [*MAIN_FAMILIES, "lfm2", "qwen3_5_text", "granitemoehybrid", "mamba", "llava", "qwen3_vl", "gemma3", "paligemma-2"],
    list(MAKE),
    list(SITUATIONS),
    [False, True],
    [1, 3, 7],
)


@pytest.mark.parametrize(("family", "drafter", "situation", "behind", "slots"), CASES)
def test_tokens_are_those_of_plain_decoding(
    family: str, drafter: str, situation: str, behind: bool, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = check_identity(family, MAKE[drafter], situation, slots, behind=behind, patch=monkeypatch)
    if (
        DEVICE.type == "cpu" and family in MAIN_FAMILIES and drafter not in ("oracle", "ensemble", "choosing")
    ):  # which look at numbers
        assert (repeated > 3) == behind


@cache
def greedy(family: str, count: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what `generate` says to them."""
    prompts = random_prompts(count, seed)
    return prompts, [generate_reference(base_of(family).model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("family", slow_but(MAIN_FAMILIES, FAMILIES))
def test_greedy_equals_generate(family: str) -> None:
    prompts, expected = greedy(family, 6, len(family))
    requests = [Request(prompt, SamplingParams(max_new_tokens=NEW_TOKENS)) for prompt in prompts]
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    for drafter in (OracleDrafter(texts), AdversarialDrafter(seed=1)):
        # Three slots for six requests: slots are refilled while others decode.
        found = run_engine(base_of(family), drafter, requests, max_num_seqs=3, num_draft_tokens=10)
        assert tokens_of(found) == expected
        assert isinstance(drafter, AdversarialDrafter) or sum(one.counts.num_accepted_draft_tokens for one in found) > 0


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
            assert tokens_of(found) == expected, drafter
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", slow_but(["llama", "gemma2"], MAIN_FAMILIES))
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
    texts = texts_of(requests, expected)
    engine = engine_of(base, OracleDrafter(texts), max_num_seqs=4, num_draft_tokens=10)
    assert tokens_of(decode(engine, requests)) == tokens_of(expected)
    state = engine.state()
    assert state.shared_tokens >= 3 * 20  # of those that enter together
    assert state.shared_tokens + state.prefilled_tokens == sum(len(r.prompt_ids) - 1 for r in requests)


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
        assert tokens_of(found) == expected


def test_sampled_tokens_are_a_function_of_the_seed() -> None:
    """Under every setting, alone and in batches, in either order."""
    base, prompts = base_of("llama"), random_prompts(14, seed=5)
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=NEW_TOKENS, seed=seed, **SETTINGS[seed % len(SETTINGS)]))
        for seed, prompt in enumerate(prompts)
    ]
    expected = plainly(base, requests)
    texts = texts_of(requests, expected)
    for name, slots, order in (("adversarial", 6, 1), ("oracle", 14, -1), ("oracle", 1, 1), ("heads", 5, -1)):
        drafter = MAKE[name](base, texts)
        found = run_engine(base, drafter, requests[::order], max_num_seqs=slots, num_draft_tokens=10)[::order]
        assert tokens_of(found) == tokens_of(expected), name


def test_log_probabilities_do_not_depend_on_the_drafter() -> None:
    base = base_of("gemma2")
    requests = [
        Request(p, SamplingParams(NEW_TOKENS, temperature=row % 2, seed=row, logprobs=[None, 2, 0][row % 3]))
        for row, p in enumerate(random_prompts(6, seed=8))
    ]
    expected = plainly(base, requests)
    for drafter in (AdversarialDrafter(seed=1), OracleDrafter(texts_of(requests, expected))):
        found = run_engine(base, drafter, requests, max_num_seqs=4, num_draft_tokens=10)
        for ours, plain in zip(found, expected, strict=True):
            assert (ours.logprobs is None) == (plain.logprobs is None)
            for one, other in zip(ours.logprobs or (), plain.logprobs or (), strict=True):
                assert (one.token_id, [t for t, _ in one.top]) == (other.token_id, [t for t, _ in other.top])
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


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
    texts = tokens_of(run_engine(base, PlainDecoding(), [Request(p, free) for p in prompts], max_num_seqs=8))
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
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, **settings)
        for drafter in (PlainDecoding(), OracleDrafter([prompt + ids])):
            engine = Engine(base, drafter, WithSpecialToken(), EngineConfig(max_num_seqs=1, num_draft_tokens=10))
            handle = engine.submit(Request(prompt, sampling), stream=True)
            finish(engine)
            found = handle.result(0)
            assert (found.token_ids, found.text, found.finish_reason) == (ids[: end + 1], shown, "stop")
            assert "".join(delta.text for delta in handle) == shown
            # What was accepted beyond the end is no output: of a step's tokens it is neither counted nor told.
            assert [one.token_id for one in found.logprobs or ()] == found.token_ids
            steps = found.counts.per_step_accepted
            assert sum(steps) == found.counts.num_accepted_draft_tokens <= len(found.token_ids)


def test_a_row_ends_at_the_slots_last_position() -> None:
    base = base_of("gpt2")  # learned positions: reading past the table would raise
    prompts = [[5, 6, 7] * 40, [8] * 126, [9]]
    requests = [Request(prompt, SamplingParams(max_new_tokens=500, ignore_eos=True)) for prompt in prompts]
    expected = plainly(base, requests)
    known = [prompt + one.token_ids for prompt, one in zip(prompts, expected, strict=True)]
    found = run_engine(base, OracleDrafter(known), requests, max_num_seqs=2, num_draft_tokens=10)
    assert tokens_of(found) == tokens_of(expected)
    assert [len(prompt) + len(one.token_ids) for prompt, one in zip(prompts, found, strict=True)] == [128, 128, 128]
    assert {one.finish_reason for one in found} == {"length"}


def test_plain_decoding_is_one_token_a_forward() -> None:
    requests = [Request(prompt, SamplingParams(max_new_tokens=9)) for prompt in random_prompts(5)]
    for one in run_engine(base_of("llama"), PlainDecoding(), requests, max_num_seqs=2):
        assert one.counts.num_decode_steps == one.counts.num_output_tokens == len(one.token_ids)
        assert one.counts.num_draft_tokens == 0
