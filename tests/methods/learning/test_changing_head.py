"""A head may become another one between any two steps, and no token changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter import devices
from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, Loan, PlainDecoding, SlotState
from drafter.drafters.merged import ChoosingDrafter, MergedDrafter
from drafter.errors import LoadError
from drafter.heads.checkpoint import save_head
from drafter.heads.contract import Provenance
from drafter.methods.learning.drafter import ChangingHead, Learning, changing_head, load_weights, weights_of
from drafter.methods.learning.settings import StartingHead
from drafter.methods.memory.drafter import MemoryDrafter
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.requests import Generation, Request, SamplingParams
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.tree.token_tree import TokenTree
from tests.support.heads import DEPTH, KINDS, make_head
from tests.support.marks import slow_but
from tests.support.models import base_of, engine_of, finish, random_prompts, run_engine, tokens_of
from tests.support.tapes import queue_steps

NODES = 8


base = partial(base_of, "llama")


def start_of(kind: str) -> StartingHead:
    """From nothing."""
    algorithm, settings = KINDS[kind]
    return StartingHead(algorithm=algorithm, settings={"depth": DEPTH, **settings})


def weights(kind: str, seed: int) -> dict[str, Tensor]:
    return weights_of(make_head(base(), kind, seed))


def requests() -> list[Request]:
    return [
        Request(prompt, SamplingParams(20, temperature=0.8 * (row % 2), seed=row, ignore_eos=True), str(row))
        for row, prompt in enumerate(random_prompts(9, seed=3))
    ]


@cache
def plain() -> list[list[int]]:
    return tokens_of(run_engine(base(), PlainDecoding(), requests()))


def decode(drafter: Drafter, before_step: Callable[[int], Any], slots: int = 3) -> list[Generation]:
    engine = engine_of(base(), drafter, max_num_seqs=slots, num_draft_tokens=NODES, max_model_len=96)
    handles = [engine.submit(request) for request in requests()]
    step = 0
    while not engine.idle:
        before_step(step)
        engine.step()
        step += 1
    return [handle.result(0) for handle in handles]


def every_third(head: ChangingHead, kind: str) -> Callable[[int], None]:
    """Offer another random head every three steps; each is as wrong as can be, and sure of itself."""

    def offer(step: int) -> None:
        if step % 3 == 0:
            wild = {
                name: tensor * 3 if tensor.is_floating_point() else tensor
                for name, tensor in weights(kind, step).items()
            }
            head.offer(step // 3 + 1, wild)

    return offer


FAST = [("context 2", False), ("eagle3", True), ("medusa", False)]
ALL = [*FAST, ("ctc", True), ("ctc, paper's loss", False), ("hydra++", True), ("hydra", False), ("specformer", True)]


@pytest.mark.parametrize("case", slow_but(FAST, ALL), ids=str)
def test_tokens_stay_those_of_plain_decoding(case: tuple[str, bool]) -> None:
    kind, in_place = case
    drafter = ChangingHead(start_of(kind), base(), NODES, in_place=in_place)
    found = decode(drafter, every_third(drafter, kind))
    assert tokens_of(found) == plain()
    for one in found:
        assert len(one.drafter_versions) >= 2
        assert one.drafter_versions == sorted(set(one.drafter_versions))


@pytest.mark.parametrize("merge", [MergedDrafter, None])
def test_a_head_among_others_may_change_too(merge: type[MergedDrafter] | None) -> None:
    head, others = (
        ChangingHead(start_of("context 2"), base(), NODES),
        (MemoryDrafter(NODES), NgramDrafter(NODES)),
    )
    if merge is None:
        drafter: Drafter = ChoosingDrafter({"head": MergedDrafter(head, others[0]), "ngram": others[1]})
    else:
        drafter = merge(head, *others)
    found = decode(drafter, every_third(head, "context 2"))
    assert tokens_of(found) == plain()


def swap(head: ChangingHead) -> None:
    """Take what was offered, as after a step."""
    head.observe(Committed([], []))


class Compared(Drafter):
    """Drafts with a head that changes, and asks a drafter that had its last weights from the start what it thinks."""

    def __init__(self, changing: ChangingHead, other: Drafter) -> None:
        self.changing, self.other, self.spec = changing, other, changing.spec
        self.same: list[bool] = []

    def open(self, loan: Loan) -> None:
        self.changing.open(loan)
        self.other.open(loan)

    @property
    def slots(self) -> Sequence[SlotState]:  # type: ignore[override]
        return [*self.changing.slots, *self.other.slots]

    def observe(self, committed: Committed) -> None:
        self.changing.observe(committed)
        self.other.observe(committed)

    def prepare(self, context: DraftContext) -> None:
        self.changing.prepare(context)
        self.other.prepare(context)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        tree, expected = self.changing.propose(context, ask), self.other.propose(context, ask)
        if self.changing.version == 1:
            self.same.append(torch.equal(tree.tokens, expected.tokens))
            torch.testing.assert_close(tree.log_probs, expected.log_probs)
        return tree


def drafts_alike(changing: ChangingHead, other: Drafter, second: dict[str, Tensor]) -> None:
    """After a change to the weights `second`, which `other` has always had, both draft the same."""
    compared = Compared(changing, other)

    def change(step: int) -> None:
        if step == 7:
            changing.offer(1, second)
            swap(changing)
            assert changing.version == 1

    assert tokens_of(decode(compared, change)) == plain()
    assert len(compared.same) > 10
    assert all(compared.same)


# Where a CPU drafts with copies of the weights, as of most heads, none can be changed in place.
@pytest.mark.parametrize(
    "case",
    slow_but(
        [("context 2", False), ("eagle3", True)],
        [("context 2", False), ("eagle3", True), ("eagle3", False), ("hydra++", False), ("specformer", False)],
    ),
    ids=str,
)
def test_after_a_change_it_drafts_as_if_it_had_had_the_weights_from_the_start(case: tuple[str, bool]) -> None:
    """All that it keeps of each sequence is made anew."""
    kind, in_place = case
    second = weights(kind, 5)
    other = make_head(base(), kind, 1)
    load_weights(other, second)
    drafts_alike(
        ChangingHead(start_of(kind), base(), NODES, in_place=in_place),
        other.drafter(base(), NODES),
        second,
    )


def test_what_a_search_keeps_of_the_weights_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the LM head's products with the head's own weights are computed in advance."""
    algorithm, settings = KINDS["context 2"]
    settings = {"depth": DEPTH, **settings, "joint_size": 4}
    second = weights_of(make_head(base(), "context 2", 5, joint_size=4))
    other = make_head(base(), "context 2", 1, joint_size=4)
    load_weights(other, second)
    with monkeypatch.context() as patched:
        patched.setattr(devices, "is_asynchronous", lambda device: True)
        changing = ChangingHead(StartingHead(algorithm=algorithm, settings=settings), base(), NODES)
        drafter = other.drafter(base(), NODES)
    drafts_alike(changing, drafter, second)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "context 2"])
def test_recorded_steps_draft_with_the_weights_of_now(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: steps are repeated as they were recorded with other weights, and the host is a step behind."""
    expected, recorder = plain(), queue_steps(monkeypatch)
    head = ChangingHead(start_of(kind), base(), NODES)
    engine = engine_of(
        base(),
        MergedDrafter(head, NgramDrafter(NODES)),
        max_num_seqs=3,
        num_draft_tokens=NODES,
        max_model_len=96,
    )
    accepted: list[list[list[int]]] = []
    for number, seed in enumerate([3, 4, 3], start=1):
        handles = [engine.submit(request) for request in requests()]
        if number > 1:
            for _ in range(4):  # it changes while sequences are under way
                engine.step()
        head.offer(number, weights(kind, seed))
        assert tokens_of(finish(engine, handles)) == expected
        handles = [engine.submit(request) for request in requests()]
        found = finish(engine, handles)
        assert tokens_of(found) == expected
        assert all(one.drafter_versions == [number] for one in found)
        accepted.append([one.counts.per_step_accepted for one in found])
    assert accepted[0] == accepted[2] != accepted[1]
    assert recorder.repeated > 50
    assert recorder.restarts == 0


def test_before_its_first_version_a_head_from_nothing_drafts_nothing() -> None:
    drafter = ChangingHead(start_of("context 2"), base(), NODES)
    assert [drafter.drafts, drafter.version] == [False, None]
    found = decode(drafter, lambda step: None)
    assert tokens_of(found) == plain()
    assert all(one.counts.num_draft_tokens == 0 and one.drafter_versions == [] for one in found)
    drafter.offer(1, weights("context 2", 0))
    assert [drafter.drafts, drafter.version] == [False, None]  # only a step takes it
    swap(drafter)
    assert [drafter.drafts, drafter.version] == [True, 1]


def test_a_row_that_was_kept_serves_a_head_that_has_changed() -> None:
    head = ChangingHead(start_of("context 2"), base(), NODES)
    engine = engine_of(base(), head, max_num_seqs=1, num_draft_tokens=NODES, max_model_len=96, kept_rows=2)
    request = Request(list(range(3, 40)), SamplingParams(12, ignore_eos=True))
    found = []
    for number in (1, 2):
        head.offer(number, weights("context 2", number))
        found += finish(engine, [engine.submit(request)])
    assert found[0].token_ids == found[1].token_ids
    assert ([one.num_cached_tokens for one in found], found[1].drafter_versions) == ([0, 36], [2])


def test_versions_may_come_from_any_thread_and_the_newest_counts() -> None:
    drafter = ChangingHead(start_of("medusa"), base(), NODES)
    threads = [threading.Thread(target=drafter.offer, args=(number, weights("medusa", number))) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    swap(drafter)
    assert drafter.version == 5
    drafter.offer(4, weights("medusa", 4))
    swap(drafter)
    assert drafter.version == 5


def test_weights_that_do_not_fit_change_nothing() -> None:
    drafter = ChangingHead(start_of("context 2"), base(), NODES)
    good = weights("context 2", 0)
    name = next(name for name, tensor in good.items() if tensor.dim() == 2)
    for bad, reason in (
        ({one: tensor for one, tensor in good.items() if one != name}, "of another shape than the one that drafts"),
        ({**good, name: good[name][:1]}, "has shape"),
        ({**good, name: torch.full_like(good[name], torch.nan)}, "not finite"),
    ):
        with pytest.raises(LoadError, match=reason):
            drafter.offer(1, bad)
    swap(drafter)
    assert drafter.version is None
    drafter.offer(1, good)
    swap(drafter)
    assert drafter.version == 1


def test_a_given_head_drafts_from_the_start(tmp_path: Any) -> None:
    head = make_head(base(), "medusa")
    head.provenance = Provenance("tiny", base().fingerprint, {"learnt": {"version": 4}})
    save_head(head, tmp_path)
    drafter = ChangingHead(StartingHead(str(tmp_path)), base(), NODES)
    assert (drafter.drafts, drafter.version) == (True, 4)  # a resubmission goes on counting
    found = decode(drafter, lambda step: drafter.offer(5, weights("medusa", 1)) if step == 6 else None)
    assert tokens_of(found) == plain()
    assert found[0].drafter_versions == [4, 5]


def test_what_a_learning_drafter_is_made_of() -> None:
    start = start_of("ctc")
    drafter = Learning(start).drafter("auto", base(), NODES)
    learnt = {name for name in drafter.members if "head" in name.split("+")}
    assert "head" in learnt < set(drafter.members)
    assert {name for name, member in drafter.members.items() if not member.drafts} == learnt
    changing_head(drafter).offer(1, weights("ctc", 0))
    swap(changing_head(drafter))
    assert {name for name, member in drafter.members.items() if member.version == 1} == learnt
    assert all(member.drafts for member in drafter.members.values())
    assert drafter.spec.hidden_layers == (LM_HEAD_INPUT,)
    with pytest.raises(LoadError, match="has no head that could learn"):
        Learning(start).drafter("ngram", base(), NODES)
    with pytest.raises(LoadError, match="nothing is drafted"):
        Learning(start).drafter("auto", base(), 0)
    with pytest.raises(LoadError, match="draft_vocab_size"):
        Learning(StartingHead(settings={"draft_vocab_size": 50})).drafter("auto", base(), NODES)
