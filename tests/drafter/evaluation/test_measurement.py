"""The measurement on a tiny base: every arm has the same tokens, and the counts add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from drafter.drafters.contract import MeasuredWorth
from drafter.drafters.registry import load_drafter
from drafter.errors import LoadError
from drafter.evaluation.decoders import differing_tokens, warm_up_request
from drafter.evaluation.measurement import Evaluation, Progress
from drafter.evaluation.questions import Question, QuestionError
from drafter.evaluation.results import PLAIN, STAGES, Arm, Plan, Results
from drafter.heads.checkpoint import save_head
from drafter.heads.contract import Provenance
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.heads import make_head
from tests.support.models import EOS, VOCABULARY, SpellingTokenizer

QUESTIONS = {
    "chat": [Question("1", "stem", ("ab", "c")), Question("2", "math", ("defgh",)), Question("3", "math", ("i", "jk"))],
    "sums": [Question(f"line {number}", "", ("xyz" * number,)) for number in (1, 2, 3, 4)],
}


class LetterTokenizer(SpellingTokenizer):
    """Tokenises text into characters."""

    pad_token_id, eos_token_id = 0, EOS

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % (VOCABULARY - 3) for letter in text]}


def saved_head(base: BaseModel, kind: str, folder: Path) -> str:
    head = make_head(base, kind)
    head.provenance = Provenance("tiny", base.fingerprint, {"steps": 0})
    save_head(head, folder)
    return str(folder)


def evaluate(base: BaseModel, plan: Plan) -> tuple[Results, list[Progress]]:
    evaluation = Evaluation(base, LetterTokenizer(), QUESTIONS, plan)
    results, progress = evaluation.describe("a command", dict.fromkeys(QUESTIONS, "a file")), []
    for item in evaluation.run():
        if isinstance(item, Progress):
            progress.append(item)
        else:
            results.cells.extend(item)
    return results, progress


@pytest.mark.slow
def test_every_arm_says_what_plain_decoding_says(tiny_base: BaseModel, tmp_path: Path) -> None:
    heads = saved_head(tiny_base, "ctc", tmp_path / "ctc"), saved_head(tiny_base, "context 1", tmp_path / "context")
    plan = Plan(
        (*heads, "ngram"),
        num_draft_tokens=(4, "auto"),
        batches=(1, 3),
        temperatures=(0.0, 0.8),
        rounds=2,
        max_new_tokens=6,
    )
    results, progress = evaluate(tiny_base, plan)
    # Two trees of the first head, one of the others; plain decoding.
    assert len(results.cells) == (2 + 1 + 1) * 2 * len(QUESTIONS) * 4 + len(QUESTIONS) * 4
    assert [(one.drafter, one.tree) for one in results.skipped] == [(heads[1], "static"), ("ngram", "static")]
    assert set(results.heads) == set(heads)
    for cell in results.cells:
        assert cell.differing_tokens == 0
        prompts = 5 if cell.questions == "chat" else 4
        assert [len(runs) for runs in cell.tokens] == [prompts if cell.batch == 1 else 1] * plan.rounds
        assert set(cell.counts) == ({"stem", "math"} if cell.questions == "chat" else {""})
        assert sum(one.num_output_tokens for one in cell.counts.values()) == sum(map(sum, cell.tokens))
        if cell.arm == PLAIN:
            assert all(one.num_decode_steps == one.num_output_tokens for one in cell.counts.values())
        assert cell.stages is not None
        assert set(cell.stages.seconds) == set(STAGES)
        assert cell.stages.seconds["verify"] > 0
        if cell.arm.nodes != "auto":
            assert (cell.stages.seconds["tree"] > 0) == (cell.arm != PLAIN)
    last = [one for one in progress if one.done == one.total]
    assert [one.setting for one in last] == list(dict.fromkeys(cell.setting for cell in results.cells))


def test_places_that_are_done_are_not_measured_again(tiny_base: BaseModel) -> None:
    plan = Plan(("ngram",), trees=("exact",), num_draft_tokens=(4,), batches=(1, 2), max_new_tokens=3)
    done = {(0.0, 1, "chat"), (0.0, 2, "chat"), (0.0, 2, "sums")}
    left = Evaluation(tiny_base, LetterTokenizer(), QUESTIONS, plan).run(done)
    cells = [cell for item in left if isinstance(item, list) for cell in item]
    assert {cell.setting for cell in cells} == {(0.0, 1, "sums")}


def test_each_question_is_answered_several_times(tiny_base: BaseModel) -> None:
    plan = Plan(
        ("memory",),
        ("exact",),
        num_draft_tokens=(4,),
        batches=(1,),
        temperatures=(0.8,),
        samples=3,
        max_new_tokens=6,
    )
    results, _ = evaluate(tiny_base, plan)
    assert (results.questions["sums"]["questions"], results.questions["sums"]["prompts"]) == (4, 12)
    cells = [cell for cell in results.cells if cell.questions == "sums"]
    assert cells[0].question_by_prompt == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    # The turns of a chat are of one question, all first turns first.
    assert next(cell for cell in results.cells if cell.questions == "chat").question_by_prompt == [
        *(0, 0, 0, 1, 1, 1, 2, 2, 2),
        *(0, 0, 0, 2, 2, 2),
    ]
    assert {cell.arm.method: len(cell.tokens[0]) for cell in cells}["memory"] == 12
    assert all(cell.differing_tokens == 0 for cell in cells)
    assert [cell.arm.method for cell in cells] == ["plain decoding", "memory"]


def test_a_memory_has_nothing_of_another_temperatures_answers(tiny_base: BaseModel) -> None:
    """At so low a temperature the answers are those of temperature 0."""
    plan = Plan(
        ("memory",),
        ("exact",),
        num_draft_tokens=(4,),
        batches=(1,),
        temperatures=(0.01,),
        max_new_tokens=6,
    )
    alone, _ = evaluate(tiny_base, plan)
    after, _ = evaluate(tiny_base, replace(plan, temperatures=(0.0, 0.01)))
    counts = [[cell.counts for cell in some.cells if cell.temperature] for some in (alone, after)]
    assert counts[0] == counts[1]
    assert len(counts[0]) == 2 * len(QUESTIONS)


def test_a_memory_has_nothing_of_other_questions_answers(tiny_base: BaseModel) -> None:
    """As after a job that was stopped between them."""
    plan = Plan(("memory",), ("exact",), num_draft_tokens=(4,), batches=(1,), max_new_tokens=6)
    twice = Evaluation(tiny_base, LetterTokenizer(), {"first": QUESTIONS["sums"], "again": QUESTIONS["sums"]}, plan)
    first, again = (item for item in twice.run() if isinstance(item, list))
    assert [cell.counts for cell in first] == [cell.counts for cell in again]


def test_the_warm_up_tells_a_memory_nothing_of_the_answers() -> None:
    sampling = SamplingParams(100, temperature=0.8, seed=3)
    found = warm_up_request(Request([1, 2, 3], sampling))
    assert list(found.prompt_ids) == [3, 2, 1]
    assert found.sampling == SamplingParams(16, temperature=0.8, seed=3, ignore_eos=True)
    assert warm_up_request(Request([1], SamplingParams(5))).sampling.max_new_tokens == 5


def test_a_missing_token_differs() -> None:
    assert differing_tokens([1, 2, 3], [1, 2, 3]) == 0
    assert differing_tokens([1, 9, 3, 4], [1, 2, 3]) == 2
    assert differing_tokens([], [1, 2]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafters": ()}, "drafters must be at least one value"),
        ({"drafters": ("a", "a")}, "none of them twice"),
        ({"drafters": ("none",)}, "none is no drafter"),
        ({"drafters": ("a/x/head", "ngram", "b/x/head")}, "a/x/head and b/x/head would both be called x in the tables"),
        ({"num_draft_tokens": (16, 0)}, "num_draft_tokens must be at least 1, not 0"),
        ({"batches": (-1,)}, "batches must be at least 1, not -1"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"samples": 2}, "at temperature 0 all answers to a question are the same"),
        ({"acceptance": 0.9}, "acceptance must be forced to at least 1 token a step, not 0.9"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperatures": (-0.5,)}, "temperatures must be finite and at least 0"),
        ({"temperatures": (float("nan"),)}, "temperatures must be finite and at least 0"),
        ({"trees": ("round",)}, "trees must be exact or chain or static, not round"),
    ],
)
def test_plans_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**{"drafters": ("ngram",), **settings})  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused(tiny_base: BaseModel) -> None:
    def run(**settings: object) -> None:
        plan = Plan(**{"drafters": ("ngram",), "num_draft_tokens": (4,), "batches": (1,), **settings})  # type: ignore[arg-type]
        list(Evaluation(tiny_base, LetterTokenizer(), QUESTIONS, plan).run())

    with pytest.raises(QuestionError, match="questions sums: 4 prompts do not fill a batch of 5"):
        run(batches=(5,))
    with pytest.raises(QuestionError, match="question 1, turn 1: 2 tokens of prompt and 127 of answer are more than"):
        run(max_new_tokens=127)
    with pytest.raises(LoadError, match="no draft head at 'nobody'"):
        run(drafters=("nobody",))
    with pytest.raises(LoadError, match=r"nothing to measure: only a draft head has a static tree \(trees: static\)"):
        run(trees=("static",))


def test_a_head_with_other_weights_has_other_results(tiny_base: BaseModel, tmp_path: Path) -> None:
    name = saved_head(tiny_base, "ctc", tmp_path)

    def identity() -> str:
        evaluation = Evaluation(tiny_base, LetterTokenizer(), QUESTIONS, Plan((name,), ("exact",), batches=(1,)))
        return evaluation.describe("a command", dict.fromkeys(QUESTIONS, "a file")).identity

    before = identity()
    assert identity() == before
    weights = load_file(tmp_path / "model.safetensors")
    save_file({key: tensor * 2 for key, tensor in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert identity() != before


def test_a_head_begins_with_what_its_trees_were_worth(tiny_base: BaseModel, tmp_path: Path) -> None:
    """So it does in jobs."""
    head = make_head(tiny_base, "ctc")
    history = [{"step": 8, "beta": {"4": 2.5}}]
    head.provenance = Provenance("tiny", tiny_base.fingerprint, {"history": history})
    save_head(head, tmp_path)
    plan = Plan((str(tmp_path),), ("chain",), batches=(1,))
    drafter = Evaluation(tiny_base, LetterTokenizer(), QUESTIONS, plan)._drafter(Arm(str(tmp_path), "chain", 4))
    assert drafter.worth == load_drafter(str(tmp_path), tiny_base, 4).worth == MeasuredWorth((4,), (1.5,))


def test_drafters_are_called_by_the_last_parts_of_their_folders() -> None:
    names = ["heads/ctc/", "ngram+a/b", "stack:cacheback>model:/a/b>model:org/c@cuda:1"]
    found = [Arm(name, "exact", 4).method for name in names]
    assert found == ["ctc", "ngram+b", "stack:cacheback>model:b>model:c@cuda:1"]


def test_heads_of_training_jobs_are_called_by_the_jobs_outputs() -> None:
    names = [
        "out/medusa/head",
        "out/ctc/head/",
        "a/hydra/head+ngram",
        "stack:a/b/head>model:org/head2",
        "head",
        "/head",
    ]
    found = [Arm(name, "exact", 4).method for name in names]
    assert found == ["medusa", "ctc", "hydra+ngram", "stack:b>model:head2", "head", "head"]
