"""Draft trees of rows that are steered, by guides."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from drafter.acceptance.choices import bits
from drafter.acceptance.guide import PutOff
from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.sequence import Handling
from drafter.errors import RequestError
from drafter.parts.guide import GuidePart
from drafter.parts.steering import masks, steered
from drafter.requests import Request, SamplingParams
from drafter.structured_outputs import StructuredOutputs
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree, from_nodes
from tests.support.guides import Rule, RuleGuide, RuleGuides
from tests.support.hybrids import hybrid_base
from tests.support.marks import slow_but_tuples
from tests.support.models import (
    EOS,
    VOCABULARY,
    AdversarialDrafter,
    OracleDrafter,
    SpellingTokenizer,
    base_of,
    decode,
    finish,
    random_prompts,
    tokens_of,
)
from tests.support.tapes import queue_steps
from tests.support.trees import FORK, check_slice_contract, nodes

WORDS = 70
"""Of a vocabulary of three mask words, the last of them not full."""


def phrases(*allowed: tuple[int, ...]) -> Rule:
    """A rule: the output is the beginning of one of these."""
    return lambda output: {one[len(output)] for one in allowed if output == one[: len(output)] != one}


def guide_of(*allowed: tuple[int, ...]) -> RuleGuide:
    return RuleGuide(phrases(*allowed), WORDS, EOS)


def part_of(*allowed: tuple[int, ...]) -> GuidePart:
    return GuidePart(guide_of(*allowed))


def test_what_is_forbidden_is_cut_with_all_below_it() -> None:
    """5 is forbidden, and so is 4, which is below it."""
    tree, forced = steered(FORK, [part_of((3, 8), (3, 9), (6,))], most=3, size=8, depth=4)
    assert (tree.tokens.tolist(), tree.parents.tolist(), forced) == ([[7, 3]], [[0, 0]], [0])


def test_what_must_come_is_drafted_where_nobody_drafted_it() -> None:
    """After 5 and 4 come 6 and 8 whatever the model says, and they are as probable as 4."""
    tree, forced = steered(FORK, [part_of((3, 1), (3, 2), (5, 4, 6, 8), (5, 9))], most=5, size=8, depth=8)
    assert tree.tokens.tolist() == [[7, 3, 5, 4, 6, 8]]
    assert tree.parents.tolist() == [[0, 0, 0, 2, 3, 4]]
    assert tree.log_probs.tolist() == [[0.0, -0.5, -1.0, -2.0, -2.0, -2.0]]
    assert forced == [0]


def test_a_forced_beginning_comes_first_and_beside_the_budget() -> None:
    """5 and 4 must come. What was drafted as these is not drafted twice; 3 cannot be."""
    tree, forced = steered(FORK, [part_of((5, 4, 6, 1), (5, 4, 6, 2))], most=0, size=8, depth=8)
    assert (tree.tokens.tolist(), tree.depths.tolist(), forced) == ([[7, 5, 4, 6]], [[0, 1, 2, 3]], [3])
    tree, forced = steered(FORK, [part_of((5, 4, 6, 1), (5, 4, 6, 2))], most=0, size=2, depth=8)
    assert (tree.tokens.tolist(), forced) == ([[7, 5, 4]], [2])
    tree, forced = steered(FORK, [part_of((5, 4, 6, 1), (5, 4, 6, 2))], most=0, size=8, depth=1)
    assert (tree.tokens.tolist(), forced) == ([[7, 5]], [1])


def test_rows_without_a_guide_keep_their_trees() -> None:
    two = TokenTree(*(part.repeat(2, 1) for part in vars(FORK).values()))
    tree, forced = steered(two, [None, part_of((3, 1), (3, 2))], most=3, size=8, depth=4)
    assert tree.tokens.tolist() == [[7, 3, 5, 4], [7, 3, -1, -1]]
    assert forced == [0, 1]


def test_each_node_has_a_mask_of_its_own() -> None:
    found = masks(FORK, [part_of((3, 69), (3, 31), (5, 4, 32), (5, 2))], WORDS)
    assert found is not None
    allowed = [set(row.nonzero()[:, 0].tolist()) for row in bits(found[0], WORDS)]
    assert allowed == [{3, 5}, {69, 31}, {4, 2}, {32}]
    two = TokenTree(*(part.repeat(2, 1) for part in vars(FORK).values()))
    found = masks(two, [None, part_of((3, 1), (3, 2))], WORDS)
    assert found is not None
    assert bool(bits(found[0], WORDS).all())


@pytest.mark.parametrize("tree", [FORK, None])
def test_masks_are_made_of_what_the_host_knows(tree: TokenTree | None) -> None:
    """Without draft tokens of steered rows, that is their texts' ends."""
    assert masks(tree, [None], WORDS) is None
    filled: list[list[int]] = []

    class Noting(RuleGuide):
        def fill(self, mask: Tensor, later: PutOff | None = None) -> None:
            filled.append(list(self.output))

    allowed = masks(tree, [GuidePart(Noting(phrases((3,), (5, 4)), WORDS, EOS))], WORDS)
    assert allowed is not None
    assert allowed.shape == (1, 1 if tree is None else 4, 3)
    assert filled == ([[], [3], [5], [5, 4]] if tree is FORK else [[]])


@st.composite
def drafts(draw: st.DrawFn) -> TokenTree:
    count = draw(st.integers(1, 7))
    parents = [draw(st.integers(-1, place - 1)) for place in range(count)]
    depths = list[int]()
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    tokens = [draw(st.integers(3, 7)) for _ in range(count)]
    assume(len(set(zip(parents, tokens, strict=True))) == count)  # siblings differ
    made, above, levels = (torch.tensor([part]) for part in (tokens, parents, depths))
    size = count + 1 + draw(st.integers(0, 2))
    return from_nodes(torch.tensor([7]), made, above, levels, -levels.float(), size)


TEXTS = st.lists(st.lists(st.integers(3, 7), min_size=1, max_size=6).map(tuple), min_size=1, max_size=6)


@given(drafts(), TEXTS, st.integers(0, 12), st.integers(1, 12), st.integers(1, 6))
def test_only_what_may_follow_is_left(
    tree: TokenTree, texts: list[tuple[int, ...]], most: int, size: int, depth: int
) -> None:
    guide = guide_of(*texts)
    found, (begun,) = steered(tree, [GuidePart(guide)], most, size, depth)
    check_slice_contract(found)
    assert guide.output == []
    paths = set(nodes(found, 0, depth))
    possible = {text[:end] for text in texts for end in range(1, len(text) + 1)}
    assert paths <= possible
    assert found.size - 1 <= min(size, begun + most)
    run = tuple(guide.forced())[: min(depth, size)]
    assert (begun, {run[:end] for end in range(1, begun + 1)} <= paths) == (len(run), True)
    if found.size - 1 < min(size, begun + most):  # nothing was left out for want of room
        drafted = {path for path in nodes(tree, 0, 12) if path in possible and len(path) <= depth}
        kept = {path for path in drafted if all(path[: len(run)][:end] == run[:end] for end in range(len(path) + 1))}
        assert kept <= paths


def counting(output: tuple[int, ...]) -> Collection[int]:
    """Twice three tokens of choice and three that count on from the last of them, and the end."""
    if len(output) == 12:
        return [EOS]
    return range(3, VOCABULARY - 4) if len(output) % 6 < 3 else [output[-1] + 1]


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return base_of("llama")


def engine_of(base: BaseModel, drafter: Drafter, **config: int) -> Engine:
    settings = replace(EngineConfig(max_num_seqs=4, num_draft_tokens=7, max_model_len=96), **config)  # type: ignore[arg-type]
    return Engine(base, drafter, SpellingTokenizer(), settings, guides=RuleGuides(counting, VOCABULARY, EOS))


def run(engine: Engine, requests: list[Request], **options: bool) -> list[list[int]]:
    return tokens_of(decode(engine, requests, **options))


def guided_requests(**settings: object) -> list[Request]:
    asked = StructuredOutputs(regex="what the rule says")
    return [
        Request(prompt, SamplingParams(20, 0.8 * (row % 2), seed=row, structured_outputs=asked, **settings))  # type: ignore[arg-type]
        for row, prompt in enumerate(random_prompts(10, seed=2))
    ]


@pytest.mark.parametrize(("nodes", "slots"), slow_but_tuples([(7, 1), (63, 4)], [(1, 4), (7, 1), (63, 4), (31, 1)]))
def test_tokens_are_those_of_plain_decoding_under_the_same_guide(base: BaseModel, nodes: int, slots: int) -> None:
    requests = guided_requests()
    expected = run(engine_of(base, PlainDecoding()), requests)
    assert all(len(one) == 13 for one in expected)
    texts = [[*request.prompt_ids, *one] for request, one in zip(requests, expected, strict=True)]
    for drafter in (OracleDrafter(texts), AdversarialDrafter(1, nodes=63)):
        engine = engine_of(base, drafter, num_draft_tokens=nodes, max_num_seqs=slots)
        assert run(engine, requests) == expected
        assert run(engine, requests, stream=True) == expected


def test_forced_tokens_are_drafted_without_a_drafter_that_knows_them(base: BaseModel) -> None:
    class Nothing(AdversarialDrafter):
        def propose(self, context, ask):  # type: ignore[no-untyped-def]
            return PlainDecoding().propose(context, ask)

    engine = engine_of(base, Nothing(0, nodes=63))
    found = decode(engine, guided_requests())
    for one in found:
        assert one.forced == [3, 4, 5, 9, 10, 11, 12]
        assert one.counts.num_forced_tokens == len(one.forced)
        assert (one.counts.num_accepted_draft_tokens, one.counts.num_decode_steps) == (7, 7)


def test_a_dead_end_is_the_rows_own_error(base: BaseModel) -> None:
    guides = RuleGuides(lambda output: [5, 6] if len(output) < 3 else [], VOCABULARY, EOS)
    settings = EngineConfig(max_num_seqs=2, num_draft_tokens=3, max_model_len=64)
    engine = Engine(base, AdversarialDrafter(1, nodes=3), SpellingTokenizer(), settings, guides=guides)
    guided_one = engine.submit(Request([5], SamplingParams(8, structured_outputs=StructuredOutputs(regex="x"))))
    drawn_one = engine.submit(Request([5], SamplingParams(8, 1.0, structured_outputs=StructuredOutputs(regex="x"))))
    free_one = engine.submit(Request([5], SamplingParams(8, ignore_eos=True)))
    finish(engine)
    for handle in (guided_one, drawn_one):
        with pytest.raises(RequestError, match="structured_outputs: no token is left to choose after 3 generated ones"):
            handle.result(0)
    assert len(free_one.result(0).token_ids) == 8


def test_other_limits_and_a_guide_can_leave_nothing(base: BaseModel) -> None:
    engine = engine_of(base, AdversarialDrafter(1))
    handle = engine.submit(guided_requests(allowed_token_ids=[5])[0])
    finish(engine)
    with pytest.raises(RequestError, match="no token is left to choose after 3 generated ones"):
        handle.result(0)


def mixed_requests() -> list[Request]:
    """Requests whose prompts begin alike, every third one without a guide."""
    start = [3 + place % 40 for place in range(24)]
    asked = StructuredOutputs(regex="what the rule says")
    return [
        Request(
            [*start, 5 + row],
            SamplingParams(20, 0.8 * (row % 2), seed=row, structured_outputs=(asked, None)[row % 3 == 0]),
        )
        for row in range(9)
    ]


@pytest.mark.parametrize(("plain", "behind"), [(1, False), (4, False), (4, True)])
def test_rows_that_must_not_have_drafts_follow_their_guides(
    base: BaseModel, plain: int, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows or all: they have masks and no draft tokens, beside rows without a guide that have some."""
    requests = mixed_requests()
    expected = run(engine_of(base, PlainDecoding(), max_num_seqs=1), requests)
    texts = [[*request.prompt_ids, *one] for request, one in zip(requests, expected, strict=True)]
    if behind:
        queue_steps(monkeypatch)
    engine = engine_of(base, OracleDrafter(texts))
    handles = [engine.submit(request) for request in requests]
    while not engine.idle:
        engine.step()
        for sequence in [one for one in engine.scheduler.active if one.steering is not None][:plain]:
            sequence.handling = Handling.PLAIN
    found = [handle.result(0) for handle in handles]
    assert tokens_of(found) == expected
    assert sum(one.counts.num_accepted_draft_tokens for one in found[::3]) > 0


@pytest.mark.parametrize(
    ("family", "graph_safe"),
    slow_but_tuples(
        [("llama", True), ("qwen3_next", True)],
        [(family, safe) for family in ("llama", "qwen3_next", "falcon_h1") for safe in (True, False)],
    ),
)
def test_on_a_gpu_guided_rows_and_others_beside_them_keep_their_tokens(
    family: str, graph_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose log-probabilities are wanted; the parts of steps between which guides speak are repeated."""
    base = base_of(family) if family == "llama" else hybrid_base(family)
    requests = [
        replace(one, sampling=replace(one.sampling, logprobs=(None, 2)[row % 3 == 1]))
        for row, one in enumerate(mixed_requests())
    ]
    expected = decode(engine_of(base, PlainDecoding(), max_num_seqs=1), requests)
    recorder, drafter = queue_steps(monkeypatch), AdversarialDrafter(3, nodes=7)
    drafter.spec = replace(drafter.spec, graph_safe=graph_safe)
    engine = engine_of(base, drafter)
    found = decode(engine, requests)
    assert tokens_of(found) == tokens_of(expected)
    assert [one.forced for one in found] == [one.forced for one in expected]
    for ours, theirs in zip(found[1::3], expected[1::3], strict=True):
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        both = ([one.logprob for one in part] for part in (ours.logprobs, theirs.logprobs))
        assert next(both) == pytest.approx(next(both), abs=1e-4)
    assert recorder.repeated > engine.state().steps / 2  # at least one part of most steps


def test_preempted_rows_and_shared_prefixes_change_nothing(base: BaseModel) -> None:
    """Every third step one of them is preempted."""
    requests = mixed_requests()
    expected = run(engine_of(base, PlainDecoding(), max_num_seqs=1), requests)
    texts = [[*request.prompt_ids, *one] for request, one in zip(requests, expected, strict=True)]
    for drafter in (OracleDrafter(texts), AdversarialDrafter(2)):
        engine = engine_of(base, drafter)
        handles = [engine.submit(request) for request in requests]
        for step in range(1000):
            if engine.idle:
                break
            engine.step()
            if step % 3 == 2 and len(engine.scheduler.active) > 1:
                engine.scheduler.put_back(engine.scheduler.youngest())
        assert [handle.result(0).token_ids for handle in handles] == expected
        assert engine.state().shared_tokens > 0
