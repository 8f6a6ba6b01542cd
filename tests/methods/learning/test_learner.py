"""From rows to versions: better ones only, the same after a resumption, and none of numbers that are not finite."""

from __future__ import annotations

import json
import pickle
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from drafter.drafters.contract import PlainDecoding
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import LoadError, TrainingError
from drafter.heads.checkpoint import load_head
from drafter.methods.learning.drafter import ChangingHead, load_start, weights_of
from drafter.methods.learning.learner import HeadVersion, Learner, rest_after
from drafter.methods.learning.rows import RowSample, SampleTap, place_of
from drafter.methods.learning.settings import LearnerSettings, StartingHead
from drafter.requests import Request, SamplingParams
from drafter.statistics import mean_acceptance_length, total
from drafter.training.loop import TorchOptimiser, Update
from drafter.training.targets import RegeneratedText, simulated_beta
from tests.support.heads import DEPTH, KINDS
from tests.support.marks import slow_but
from tests.support.models import SpellingTokenizer, base_of, finish, run_engine, tokens_of

QUICK: dict[str, Any] = {
    "texts_per_step": 4,
    "anchors_per_text": 16,
    "learning_rate": 0.02,
    "warmup_steps": 3,
    "evaluate_every": 15,
    "held_out_share": 0.25,
    "least_held_out": 2,
    "averaging": 0.8,
    "num_draft_tokens": 8,
}


base = partial(base_of, "llama")


def start_of(kind: str) -> StartingHead:
    algorithm, settings = KINDS[kind]
    return StartingHead(algorithm=algorithm, settings={"depth": DEPTH, **settings})


def requests() -> list[Request]:
    """Prompts that differ in their beginning and end alike: their greedy answers have much in common."""
    ending = [40, 41, 42, 43, 44]
    return [Request([3 + row, *ending], SamplingParams(24, ignore_eos=True), str(row)) for row in range(16)]


@cache
def rows(kind: str) -> list[RowSample]:
    """What an engine hands out of the requests."""
    tap, head = SampleTap(), ChangingHead(start_of(kind), base(), 8)
    engine = Engine(
        base(),
        head,
        SpellingTokenizer(),
        EngineConfig(max_num_seqs=8, num_draft_tokens=0, max_model_len=64),
        tap=tap,
    )
    handles = [engine.submit(request) for request in requests()]
    finish(engine)
    assert all(handle.future.done() for handle in handles)
    return tap.take(1 << 40)


def learner_of(kind: str, **settings: Any) -> Learner:
    return Learner(base(), start_of(kind), LearnerSettings(**{**QUICK, **settings}))


def work_until_published(learner: Learner, units: int = 400) -> HeadVersion:
    for _ in range(units):
        progress = learner.work(0.0)  # one unit
        if progress.version is not None:
            assert progress.beta == progress.version.beta
            return progress.version
    raise AssertionError(f"no version after {units} units: {progress}")


@pytest.mark.parametrize("kind", slow_but(["medusa"], ["medusa", "context 2", "ctc", "hydra++", "eagle3"]))
def test_a_head_from_nothing_gets_better_and_an_engine_drafts_with_it(kind: str) -> None:
    learner = learner_of(kind, uses=100)
    learner.add(rows(kind))
    version = work_until_published(learner)
    assert (version.number, version.beta_before) == (1, 1.0)
    assert version.beta >= 1.01
    sent: HeadVersion = pickle.loads(pickle.dumps(version))
    drafter = ChangingHead(start_of(kind), base(), 8)
    drafter.offer(sent.number, sent.weights)
    found = run_engine(base(), drafter, requests(), max_num_seqs=4, num_draft_tokens=8, max_model_len=64)
    expected = run_engine(base(), PlainDecoding(), requests(), max_num_seqs=4, max_model_len=64)
    assert tokens_of(found) == tokens_of(expected)
    assert all(one.drafter_versions == [1] for one in found)
    assert mean_acceptance_length(total(one.counts for one in found)) > 1.1


def test_beta_is_that_of_the_simulated_walk_over_the_held_out_rows() -> None:
    learner = learner_of("medusa", uses=100)
    learner.add(rows("medusa"))
    version = work_until_published(learner)
    learner_rows = rows("medusa")
    trained = load_start(start_of("medusa"), base())
    trained.load_state_dict(version.weights)
    held_out = [
        RegeneratedText(row.tokens.tolist(), row.prompt_length)
        for row in learner_rows
        if row.request_id in held_out_ids(learner_rows)
    ]
    assert version.beta == pytest.approx(simulated_beta(trained, base(), held_out, (8,))[8])


def held_out_ids(samples: list[RowSample]) -> set[str]:
    return {one.request_id for one in samples if place_of(one.tokens[: one.prompt_length]) < QUICK["held_out_share"]}


def test_rows_without_hidden_states_are_read_by_the_base() -> None:
    """The same rows teach the same, whether the hidden states come with them or not."""
    with_states, without = learner_of("medusa"), learner_of("medusa")
    some = rows("medusa")
    with_states.add(some)
    without.add([RowSample(row.request_id, row.tokens, row.prompt_length, None) for row in some])
    for _ in range(6):
        first, second = with_states.work(0.0), without.work(0.0)
    assert first.loss is not None
    assert first.loss == pytest.approx(second.loss, rel=1e-3)


def test_it_waits_for_rows_and_measures_nothing_with_too_few_held_out_ones() -> None:
    learner = learner_of("medusa", held_out_share=1e-9, least_held_out=100, evaluate_every=2)
    assert learner.work(10.0).idle  # at once
    learner.add(rows("medusa")[:3])
    assert learner.work(10.0).idle
    learner.add(rows("medusa"))
    progress = learner.work(60.0)  # until all rows are used up
    assert progress.idle
    places = [place_of(row.tokens[: row.prompt_length]) for row in [*rows("medusa")[:3], *rows("medusa")]]
    learnt = sum(place > min(places[: number + 1]) for number, place in enumerate(places))
    assert progress.steps == 8 * learnt // 4
    assert (progress.rows, progress.beta, progress.version) == (learnt * 8 % 4, None, None)
    assert progress.seconds > 0
    assert learner.version is None


def test_what_is_no_better_is_not_published() -> None:
    learner = learner_of("medusa", uses=100, least_gain=50.0)
    learner.add(rows("medusa"))
    measured = [learner.work(0.0).beta for _ in range(60)]
    assert len(set(measured) - {None}) >= 2
    assert learner.version is None
    with pytest.raises(ValueError, match="nothing has been published yet"):
        learner.save_head("nowhere")


def state_of(learner: Learner, folder: Path) -> dict[str, Tensor]:
    learner.save(folder)
    return dict(load_file(folder / "learner.safetensors"))


def is_at(learner: Learner, folder: Path, weights: dict[str, Tensor]) -> bool:
    """Whether what the learner goes on from, and its average, are these weights."""
    state = state_of(learner, folder)
    groups = ("weights", "average", "good")
    return all(torch.equal(state[f"{group}/{name}"], tensor) for group in groups for name, tensor in weights.items())


def test_a_loss_that_is_not_finite_discards_what_was_learnt(tmp_path: Path) -> None:
    learner = learner_of("medusa", uses=100, learning_rate=1e30, warmup_steps=0)
    learner.add(rows("medusa"))
    progress = learner.work(0.0)
    while not progress.discarded:
        progress = learner.work(0.0)
    assert learner.version is None
    assert is_at(learner, tmp_path, weights_of(load_start(start_of("medusa"), base())))


def test_after_a_loss_that_is_not_finite_the_last_good_version_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of("medusa", uses=100)
    learner.add(rows("medusa"))
    version = work_until_published(learner)
    learner.work(0.0)
    assert not is_at(learner, tmp_path / "on", version.weights)

    def fail(*args: Any) -> Update:
        raise TrainingError("the loss is nan")

    with monkeypatch.context() as patch:
        patch.setattr(TorchOptimiser, "update", fail)
        assert learner.work(0.0).discarded == 1
    assert learner.version is version
    assert is_at(learner, tmp_path / "back", version.weights)
    before = learner.work(0.0)
    after = learner.work(0.0)
    assert after.steps == before.steps + 1  # it learns on from there
    assert not is_at(learner, tmp_path / "further", version.weights)


def test_a_learner_that_is_resumed_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    learner = learner_of("context 2", uses=2)
    learner.add(rows("context 2"))
    for _ in range(4):
        learner.work(0.0)
    learner.work(60.0)  # until its rows are used up
    learner.save(tmp_path / "state")
    other = Learner.resume(base(), start_of("context 2"), tmp_path / "state", LearnerSettings(**{**QUICK, "uses": 2}))
    worked, resumed = learner.progress(), other.progress()
    assert (resumed.steps, resumed.seconds, resumed.discarded) == (worked.steps, worked.seconds, worked.discarded)
    assert resumed.steps > 0
    assert (resumed.rows, resumed.beta, resumed.version, resumed.idle) == (0, None, None, True)
    for one in (learner, other):
        one.add(rows("context 2"))
        for _ in range(3):
            progress = one.work(0.0)
    assert progress.steps == 3 + learner_steps(tmp_path / "state")
    first, second = state_of(learner, tmp_path / "first"), state_of(other, tmp_path / "second")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=0)


def test_a_learner_that_is_resumed_has_the_learning_rate_of_now(tmp_path: Path) -> None:
    learner = learner_of("medusa", uses=100)
    learner.add(rows("medusa"))
    learner.work(0.0)
    before = state_of(learner, tmp_path / "state")
    settings = LearnerSettings(**{**QUICK, "uses": 100, "learning_rate": 1e-12})
    other = Learner.resume(base(), start_of("medusa"), tmp_path / "state", settings)
    for one in (learner, other):
        one.add(rows("medusa"))
        one.work(0.0)
    name = next(name for name in before if name.startswith("weights/"))
    assert not torch.allclose(state_of(learner, tmp_path / "on")[name], before[name], atol=1e-6)
    assert torch.allclose(state_of(other, tmp_path / "other")[name], before[name], atol=1e-6)


def learner_steps(folder: Path) -> int:
    with safe_open(folder / "learner.safetensors", framework="pt") as file:
        steps: int = json.loads(file.metadata()["learner"])["totals"]["steps"]
        return steps


def test_a_state_that_is_missing_damaged_or_of_another_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no learner's state in"):
        Learner.resume(base(), start_of("medusa"), tmp_path)
    learner_of("medusa").save(tmp_path)
    with pytest.raises(LoadError, match="is not of this head"):
        Learner.resume(base(), start_of("context 2"), tmp_path)
    file = tmp_path / "learner.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(LoadError, match="is damaged"):
        Learner.resume(base(), start_of("medusa"), tmp_path)


def test_the_newest_version_is_saved_as_a_head_and_the_next_learner_goes_on_from_it(tmp_path: Path) -> None:
    learner = learner_of("medusa", uses=100)
    learner.add(rows("medusa"))
    version = work_until_published(learner)
    learner.save_head(tmp_path / "head")
    head = load_head(tmp_path / "head", base())
    assert all(torch.equal(tensor, version.weights[name]) for name, tensor in head.state_dict().items())
    assert head.provenance is not None
    learnt = head.provenance.training["learnt"]
    assert (learnt["version"], learnt["rows"], learnt["steps"]) == (1, 16, version.provenance["steps"])
    next_one = Learner(
        base(),
        StartingHead(str(tmp_path / "head")),
        LearnerSettings(**{**QUICK, "uses": 100, "least_gain": 0.0}),
    )
    next_one.add(rows("medusa"))
    before = work_until_published(next_one).beta_before
    assert before == pytest.approx(version.beta)  # what it begins with is what was saved
    assert ChangingHead(StartingHead(str(tmp_path / "head")), base(), 8).version == 1


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_work_and_rest_together_have_the_share(share: float) -> None:
    assert 3.0 / (3.0 + rest_after(3.0, share)) == pytest.approx(share)
