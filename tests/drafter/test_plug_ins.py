"""What must plug in without a change to the engine: each seam is proved by a small plug-in that is not shipped."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from threading import Thread

import pytest
import torch
from torch import Tensor

from drafter.acceptance.choices import RowSampling
from drafter.acceptance.contract import Accepted, ExactVerifier, Verified, Verifier
from drafter.acceptance.guide import Guides
from drafter.acceptance.lenient import lenient_walk, node_views, shannon_entropy
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, DraftSpec, Ids, Loan, PlainDecoding
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.slots import SlotObjects, SlotTensors
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.handle import Handle
from drafter.errors import LoadError, RequestError
from drafter.requests import Generation, Request, SamplingParams
from drafter.structured_outputs import StructuredOutputs
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import TreeNodes
from drafter.tree.token_tree import TokenTree, from_nodes, root_only
from tests.support.caches import tree_nodes
from tests.support.guides import RuleGuides
from tests.support.marks import slow_but_tuples
from tests.support.models import (
    EOS,
    VOCABULARY,
    AdversarialDrafter,
    SpellingTokenizer,
    base_of,
    finish,
    random_prompts,
    tokens_of,
)


def requests_of(count: int) -> list[Request]:
    """Greedy and random requests that enter and leave at different times."""
    return [
        Request(prompt, SamplingParams(18 - 3 * (row % 4), temperature=0.7 * (row % 2), seed=row, ignore_eos=True))
        for row, prompt in enumerate(random_prompts(count, seed=5))
    ]


def decode(
    base: BaseModel,
    drafter: Drafter,
    requests: list[Request],
    verifier: Verifier | None = None,
    slots: int = 3,
    guides: Guides | None = None,
) -> list[Generation]:
    config = EngineConfig(max_num_seqs=slots, num_draft_tokens=4, max_model_len=96)
    engine = Engine(base, drafter, SpellingTokenizer(), config, verifier=verifier, guides=guides)
    handles = [engine.submit(request) for request in requests]
    return finish(engine, handles)


def check_identity(found: list[Generation], expected: list[Generation]) -> None:
    """The same tokens; output that may differ from plain decoding's is no case for this."""
    assert all(one.lossless for one in [*found, *expected])
    assert tokens_of(found) == tokens_of(expected)


def chain(pending: Tensor, tokens: list[Tensor]) -> TokenTree:
    """One path below each root: `tokens` are `[B]` each."""
    depth = torch.arange(len(tokens))
    shape = (len(pending), len(tokens))
    parents, depths = (depth - 1).expand(shape), (depth + 1).expand(shape)
    return from_nodes(pending, torch.stack(tokens, 1), parents, depths, -depths.float(), len(tokens) + 1)


# ---- drafters


class LearningDrafter(Drafter):
    """Remembers which token came after which: in prompts, and in all that any step has added."""

    spec = DraftSpec(max_nodes=4, max_depth=4)

    def __init__(self) -> None:
        self.after: dict[int, int] = {}

    def open(self, loan: Loan) -> None:
        self.texts = SlotObjects(loan.slots, self.begin)
        self.slots = [self.texts]

    def begin(self, text: Ids, request: Request | None) -> list[int]:
        tokens: list[int] = text.tolist()
        self.after.update(itertools.pairwise(tokens))
        return tokens

    def observe(self, committed: Committed) -> None:
        for slot, tokens in zip(committed.slots, committed.tokens, strict=True):
            text = self.texts.rows[slot]
            self.after.update(itertools.pairwise([text[-1], *tokens]))
            text += tokens

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        tokens, levels = context.pending, []
        for _ in range(ask.nodes):
            tokens = torch.tensor([self.after.get(token, 0) for token in tokens.tolist()])
            levels.append(tokens)
        return chain(context.pending, levels)


def test_a_drafter_learns_from_every_step() -> None:
    base = base_of("llama")
    drafter, requests = LearningDrafter(), requests_of(8)
    check_identity(decode(base, drafter, requests), decode(base, PlainDecoding(), requests))
    again = decode(base, drafter, requests[::2])  # greedy texts, all of whose pairs of tokens it knows
    assert sum(one.counts.num_accepted_draft_tokens for one in again) > 10


def test_what_is_learnt_is_what_the_sequences_got() -> None:
    base, drafter = base_of("llama"), LearningDrafter()
    (found,) = decode(base, drafter, requests_of(1))
    assert drafter.texts.rows[0] == [*requests_of(1)[0].prompt_ids, *found.token_ids]


class SecondModel(Drafter):
    """Drafts with an LM of its own, which has a KV cache of its own.

    Args:
        lm: The draft model.
    """

    spec = DraftSpec(max_nodes=4, max_depth=4)

    def __init__(self, lm: BaseModel) -> None:
        self.lm = lm

    def open(self, loan: Loan) -> None:
        self.cache = self.lm.new_cache(loan.slots, loan.length)
        self.entries = SlotTensors(self.cache, usual=0, behind=self.spec.max_depth)
        self.slots = [self.entries]

    def prepare(self, context: DraftContext) -> None:
        for slot, unread in zip(*self.entries.advance(context), strict=True):
            start, stop = context.host_lengths[slot] + 1 - unread, context.host_lengths[slot]
            if start < stop:
                self.lm.prefill(self.cache, int(slot), [context.tokens[slot, start:stop]], [start])

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        tokens, levels = context.pending, []
        for step in range(ask.nodes):
            logits, _ = self.lm.verify(self.cache, lone_nodes(context, tokens, step))
            tokens = logits[:, 0].argmax(-1)
            levels.append(tokens)
        return chain(context.pending, levels)


def lone_nodes(context: DraftContext, tokens: Tensor, step: int) -> TreeNodes:
    """One node a row, `step` positions behind the committed ones."""
    lengths = context.lengths + step
    depths, ancestors = torch.zeros_like(tokens)[:, None], torch.ones(len(tokens), 1, 1, dtype=torch.bool)
    return tree_nodes(tokens[:, None], lengths, depths, ancestors, context.longest + step + 1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_drafter_owns_a_second_model(family: str) -> None:
    base, requests = base_of("llama"), requests_of(8)
    found = decode(base, SecondModel(base_of(family)), requests)
    check_identity(found, decode(base, PlainDecoding(), requests))
    if family == "llama":  # the base itself: whatever is greedy is accepted
        greedy = [one for one in found if requests[found.index(one)].sampling.temperature == 0]
        assert all(one.counts.num_decode_steps <= 1 + len(one.token_ids) / 4 for one in greedy)


class Layered(Drafter):
    """Looks at the outputs of single layers beside the LM head's input; drafts nothing that could be right."""

    spec = DraftSpec(max_nodes=1, max_depth=1, hidden_layers=(0, -1, 1))

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        assert context.hidden is not None
        for row, length in enumerate(context.host_lengths):
            self.seen.append((context.tokens[row, :length].clone(), context.hidden[row, :length].clone()))
        return chain(context.pending, [torch.zeros_like(context.pending)] * ask.nodes)


@pytest.mark.parametrize("merged", [False, True])
def test_a_drafter_reads_the_hidden_states_that_it_names(merged: bool) -> None:
    base, requests, inner = base_of("llama"), requests_of(5), Layered()
    drafter: Drafter = MergedDrafter(AdversarialDrafter(0, nodes=3), inner) if merged else inner
    check_identity(decode(base, drafter, requests), decode(base, PlainDecoding(), requests))
    tokens, hidden = inner.seen[-1]
    with torch.inference_mode():
        layers = base.model(input_ids=tokens[None], output_hidden_states=True).hidden_states
    # Output of layer k is entry k + 1; the last one is behind the final norm.
    expected = torch.cat([layers[1][0], layers[-1][0], layers[2][0]], -1)
    assert torch.allclose(hidden, expected, atol=1e-4)


class HalfDrafter(Drafter):
    """Has a tree for every other row only; for the others none has come in time."""

    spec = DraftSpec(max_nodes=4, max_depth=4)

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        tree = self.inner.propose(context, ask)
        in_time = torch.arange(len(tree.tokens)) % 2
        return tree.trimmed(1 + in_time * (tree.size - 1))


def test_a_row_whose_tree_is_late_makes_a_plain_step() -> None:
    base, requests = base_of("llama"), requests_of(6)
    found = decode(base, HalfDrafter(AdversarialDrafter(0, nodes=4, depth=4)), requests, slots=2)
    check_identity(found, decode(base, PlainDecoding(), requests))
    assert any(0 < one.counts.num_spec_steps < one.counts.num_decode_steps for one in found)
    assert any(one.counts.num_spec_steps == 0 for one in found)


Draft = tuple[list[int], list[int], int]


def decode_with_late_drafts(
    requests: list[Request],
    made: Callable[[int, int], Draft],
    drafter: Drafter | None = None,
    *,
    parks: bool = False,
) -> list[Generation]:
    """Bring `made(row, output tokens)` from another thread, each after the step that its text was made before.

    With `parks`, rows wait for it in that step; there are slots for them, as a row without one has no drafts.
    """
    config = EngineConfig(max_num_seqs=6 if parks else 3, num_draft_tokens=6, max_model_len=96)
    engine = Engine(base_of("llama"), drafter or PlainDecoding(), SpellingTokenizer(), config, brought=6)
    handles = [engine.submit(request) for request in requests]
    mail = queue.Queue[tuple[Handle, Draft] | None]()

    def bring() -> None:
        while (one := mail.get()) is not None:
            one[0].draft(*one[1])
            mail.task_done()

    thread = Thread(target=bring)
    thread.start()
    while not engine.idle:
        drafts = [(one.handle, made(handles.index(one.handle), len(one.output))) for one in engine.scheduler.active]
        for handle, _ in drafts if parks else ():
            handle.park()
        engine.step()
        for one in drafts:
            mail.put(one)
        mail.join()
        for handle, _ in drafts if parks else ():
            handle.unpark()
        if parks:
            engine.step()
    mail.put(None)
    thread.join()
    return [handle.result(0) for handle in handles]


@pytest.mark.parametrize("drafter", [None, AdversarialDrafter(0, nodes=3)], ids=["plain", "beside drafts"])
def test_drafts_come_late_from_another_thread(drafter: Drafter | None) -> None:
    requests = requests_of(8)
    plain = decode(base_of("llama"), PlainDecoding(), requests)

    def made(row: int, at: int) -> Draft:
        """The next tokens as plain decoding has them, and beside the second one a wrong one."""
        right = plain[row].token_ids[at : at + 4]
        tokens, parents = [*right, (right[-1] + 1) % 97], [place - 1 for place in range(len(right))]
        return tokens, [*parents, min(len(right), 2) - 2], at

    found = decode_with_late_drafts(requests, made, drafter)
    check_identity(found, plain)
    # The first of four tokens has come by then, so up to three are left.
    assert all(one.counts.num_decode_steps <= 4 + len(one.token_ids) / 3 for one in found)
    if drafter is None:
        assert all(step <= 3 for one in found for step in one.counts.per_step_accepted)


def test_parked_rows_wait_for_their_drafts() -> None:
    requests = requests_of(3)
    plain = decode(base_of("llama"), PlainDecoding(), requests)

    def made(row: int, at: int) -> Draft:
        right = plain[row].token_ids[at : at + 4]
        return right, [place - 1 for place in range(len(right))], at

    found = decode_with_late_drafts(requests, made, parks=True)
    check_identity(found, plain)
    # All but the first two steps, and the last, have four draft tokens and one more.
    assert all(one.counts.num_decode_steps <= 3 + len(one.token_ids) / 5 for one in found)


def test_late_drafts_of_another_text_are_dropped() -> None:
    requests = requests_of(8)
    plain = decode(base_of("llama"), PlainDecoding(), requests)

    def made(row: int, at: int) -> Draft:
        token = plain[row].token_ids[at]
        drafts = ([(token + 1) % 97, token], [-1, 0], at), ([token], [-1], at), ([token], [-1], at + 9)
        return drafts[row % 3]  # of another token; of the next one alone; after tokens that have not come

    found = decode_with_late_drafts(requests, made)
    check_identity(found, plain)
    assert all(one.counts.num_spec_steps == 0 for one in found)


@pytest.mark.parametrize("draft", [([5], [0], 0), ([5, 6], [-1], 0), ([97], [-1], 0), ([-1], [-1], 0), ([5], [-1], -1)])
def test_what_is_no_draft_is_refused(draft: Draft) -> None:
    engine = Engine(base_of("llama"), PlainDecoding(), SpellingTokenizer(), EngineConfig(1), brought=6)
    with pytest.raises(RequestError, match="a draft is a list of tokens below 97"):
        engine.submit(Request([5])).draft(*draft)


def test_a_root_alone_is_a_plain_step() -> None:
    class Never(PlainDecoding):
        spec = DraftSpec(max_nodes=4, max_depth=4)

        def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
            return root_only(context.pending)

    base, requests = base_of("llama"), requests_of(4)
    check_identity(decode(base, Never(), requests), decode(base, PlainDecoding(), requests))


# ---- verifiers


class Trusting(Verifier):
    """Accepts the tree's first path as long as two more draft tokens follow: not lossless."""

    name = "trusting"
    lossless = False
    lookahead = 2

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        """The first path is nodes 0, 1, 2, ..., as the tree is a chain."""
        exact = ExactVerifier().accept(verified, sampling)
        real = (verified.tree.tokens[:, 1:] >= 0).sum(1)
        count = torch.maximum(exact.count, (real - self.lookahead).clamp_min(0))
        place = torch.arange(exact.path.shape[1])
        path = torch.where(place <= count[:, None], place, 0)
        choices = verified.logits.argmax(-1).gather(1, path)
        follows = verified.tree.tokens.gather(1, (path + 1).clamp_max(verified.tree.size - 1))
        return Accepted(path, torch.where(place < count[:, None], follows, choices), count)


class WrongDrafter(Drafter):
    """Drafts a chain of tokens that the base hardly ever chooses."""

    spec = DraftSpec(max_nodes=4, max_depth=4)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        return chain(context.pending, [torch.full_like(context.pending, 7 + step) for step in range(ask.nodes)])


def test_a_verifier_that_is_not_lossless_marks_all_that_it_made() -> None:
    base = base_of("llama")
    requests = [Request(prompt, SamplingParams(12, ignore_eos=True)) for prompt in random_prompts(4)]
    found = decode(base, WrongDrafter(), requests, Trusting())
    assert not any(one.lossless for one in found)
    expected = decode(base, PlainDecoding(), requests)
    assert all(ours.token_ids != theirs.token_ids for ours, theirs in zip(found, expected, strict=True))
    assert all(one.token_ids[:2] == [7, 8] for one in found)
    with pytest.raises(AssertionError):
        check_identity(found, found)


def test_a_verifier_sees_the_same_texts_as_plain_decoding_would() -> None:
    """What was accepted leniently is in the KV cache: the base goes on from it."""
    base = base_of("llama")
    request = Request([5, 6, 7], SamplingParams(9, ignore_eos=True))
    (found,) = decode(base, WrongDrafter(), [request], Trusting())
    text = [*request.prompt_ids, *found.token_ids]
    for place in (len(request.prompt_ids) + 2, len(request.prompt_ids) + 5):  # the token after two that were trusted
        with torch.inference_mode():
            logits = base.model(input_ids=torch.tensor([text[:place]])).logits[0, -1]
        assert text[place] == int(logits.argmax())


def test_drafter_and_verifier_must_go_together() -> None:
    class Shallow(WrongDrafter):
        spec = DraftSpec(max_nodes=1, max_depth=1)

    with pytest.raises(LoadError, match="trusting looks 2 draft tokens ahead"):
        decode(base_of("llama"), Shallow(), requests_of(1), Trusting())


class Uncertain(Verifier):
    """Accepts each draft token that is not impossible: not lossless."""

    name = "uncertain"
    lossless = False

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        views = node_views(verified, sampling, shannon_entropy)
        possible = views.log_probs > -torch.inf
        return lenient_walk(verified.tree, views.choices, possible, views.log_probs, verified.depth)


def rising_and_falling(output: tuple[int, ...]) -> range | list[int]:
    """A grammar with a memory of the whole output: it begins below 10, an even number of tokens is followed by a larger
    token and an odd one by a smaller one, and after a 3 comes 20. The end is allowed after a 20.
    """
    if not output:
        return range(3, 10)
    if output[-1] == 3:
        return [20]
    some = range(output[-1] + 1, VOCABULARY) if len(output) % 2 else range(3, max(output[-1], 4))
    return [EOS, *some] if output[-1] == 20 else some


RULED = list(
    itertools.product([ExactVerifier(), Uncertain()], [AdversarialDrafter(3, nodes=4), WrongDrafter()], [0.0, 0.9])
)


@pytest.mark.parametrize(("verifier", "drafter", "temperature"), slow_but_tuples(RULED[::3] + RULED[5:6], RULED))
def test_a_grammar_says_what_may_follow(drafter: Drafter, verifier: Verifier, temperature: float) -> None:
    base, asked = base_of("llama"), StructuredOutputs(regex="what the rule says")
    requests = [
        Request(prompt, SamplingParams(18, temperature, seed=row, structured_outputs=asked if row % 3 else None))
        for row, prompt in enumerate(random_prompts(9, seed=5))
    ]
    guides = RuleGuides(rising_and_falling, VOCABULARY, EOS)
    found = decode(base, drafter, requests, verifier, guides=guides)
    if verifier.lossless:
        check_identity(found, decode(base, PlainDecoding(), requests, verifier, guides=guides))
    for one in (one for row, one in enumerate(found) if row % 3):
        for place, token in enumerate(one.token_ids):
            assert token in rising_and_falling(tuple(one.token_ids[:place]))
        assert one.forced == [place for place, before in enumerate(one.token_ids, 1) if before == 3 and place < 18]
