"""GRPO by the real TRL, with a draft head: it learns from what plain decoding draws with the weights of each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter import EngineConfig, LoadError, Request, RequestError, SamplingParams, SpeculativeLM
from drafter.drafters.contract import PlainDecoding
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.handle import Handle
from drafter.target_model.model import BaseModel
from drafter.trl import Rollout, make_rollout, sampling_of

pytest.importorskip("trl")

from examples import grpo


class Checked:
    """A rollout whose results are compared with plain decoding, by a model loaded with the weights of each call."""

    def __init__(self, lm: SpeculativeLM) -> None:
        self._lm, self._rollout = lm, make_rollout(lm)
        self.calls, self.accepted, self.first = 0, 0, list[list[int]]()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        asked: list[Request] = []
        submit = self._lm.submit

        def noted(request: Request) -> Handle:
            asked.append(request)
            return submit(request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._lm, "submit", noted)
            found = self._rollout(prompts, trainer)
        self.calls += 1
        self.first = self.first or found["completion_ids"]
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE, dtype="float32").eval()
        model.load_state_dict(trainer.model.state_dict())
        check(model, self._lm.tokenizer, asked, found)
        assert found["prompt_ids"] == [self._lm.encode(prompt) for prompt in prompts]
        return found


def check(model: Any, tokenizer: Any, asked: Sequence[Request], found: dict[str, list[Any]]) -> None:
    for request, tokens, logprobs in zip(asked, found["completion_ids"], found["logprobs"], strict=True):
        with torch.no_grad():
            text = torch.tensor([[*request.prompt_ids, *tokens]])
            logits = model(text).logits[0, len(request.prompt_ids) - 1 : -1].double()
        assert request.sampling.temperature is not None
        wanted = (logits / request.sampling.temperature).log_softmax(-1)
        assert logprobs == pytest.approx(
            [float(row[token]) for row, token in zip(wanted, tokens, strict=True)], abs=1e-3
        )
    with SpeculativeLM(BaseModel(model), PlainDecoding(), tokenizer, EngineConfig(16, 256)) as plain:
        handles = [plain.submit(request) for request in asked]
        assert [handle.result(60).token_ids for handle in handles] == found["completion_ids"]


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.long])])
def test_rollouts_are_plain_decodings_under_the_weights_of_their_step(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Checked] = []

    def checked(lm: SpeculativeLM) -> Rollout:
        made.append(Checked(lm))
        return made[0]

    monkeypatch.setattr(grpo, "make_rollout", checked)
    with SpeculativeLM.from_pretrained(drafter="ctc", device="cpu", num_draft_tokens=7) as lm:
        trainer = grpo.train(lm, steps, str(tmp_path), temperature=0.8)
        counts = lm.engine.state()
        assert lm.base.weights_version == made[0].calls == steps
    assert counts.accepted_tokens > 0
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == steps
    changed = zip(trainer.model.parameters(), lm.base.model.parameters(), strict=True)
    assert not all(torch.equal(*pair) for pair in changed)  # the last step's weights have drawn nothing
    if steps > 10:
        assert sum(rewards[-3:]) > sum(rewards[:3])


def test_verifiers_that_are_not_lossless_are_refused_by_name() -> None:
    with (
        SpeculativeLM.from_pretrained(drafter="ctc", device="cpu", verifier="typical", num_draft_tokens=7) as lm,
        pytest.raises(LoadError, match="the verifier typical lets tokens pass"),
    ):
        make_rollout(lm)


def trainer_of(**changes: Any) -> Any:
    """What a rollout reads of a trainer."""
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "seed": 1}
    args = {**given, "max_completion_length": 8, "generation_kwargs": None, **changes}
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, process_index=0)
    facts: dict[str, Any] = {"tools": [], "eos_token_ids": [2], "accelerator": accelerator}
    facts |= {name: args.pop(name) for name in ("tools", "model", "processing_class") if name in args}
    return SimpleNamespace(**facts, state=SimpleNamespace(global_step=0), args=SimpleNamespace(**args))


def test_calls_of_a_rollout() -> None:
    """Each draws by seeds of its own, the same in each run; an evaluation takes over weights that it has not yet."""
    texts = ["Tom has 3 boxes", "Tom has 3 boxes", "Janet"]
    with SpeculativeLM.from_pretrained(drafter="ngram", device="cpu", num_draft_tokens=4, max_model_len=32) as lm:
        trainer = trainer_of(model=lm.base.model, processing_class=lm.tokenizer)
        runs = []
        for _ in range(2):
            rollout = make_rollout(lm)
            runs.append([rollout(texts, trainer) for _ in range(2)])
        assert lm.base.weights_version == 2  # once for each, as the model is not in training
        assert runs[0] == runs[1]
        first, second = (one["completion_ids"] for one in runs[0])
        assert first != second
        assert first[0] != first[1]
        assert runs[0][0]["prompt_ids"] == [lm.encode(text) for text in texts]
        trainer.model.train()
        rollout(texts, trainer)
        rollout(texts, trainer)
        assert lm.base.weights_version == 4
        trainer.model.eval()
        with pytest.raises(RequestError, match="prompt 1 has 30 tokens, and with 8 of a completion"):
            rollout([texts[0], "a " * 29 + "a"], trainer)
        chat = [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]
        with pytest.raises(RequestError, match="prompts with images"):
            rollout([chat], trainer)


def test_settings_are_the_trainers() -> None:
    wanted = SamplingParams(8, temperature=0.7, top_p=0.9, top_k=0, min_p=0.0, repetition_penalty=1.0, logprobs=0)
    assert sampling_of(trainer_of()) == sampling_of(trainer_of(generation_kwargs={})) != wanted
    assert sampling_of(trainer_of(generation_kwargs={"min_p": 0.1})).min_p == 0.1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.0}, "a temperature above 0"),
        ({"max_completion_length": None}, "max_completion_length"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams: not supported"),
        ({"tools": [len]}, "tools and environments are not rolled out"),
    ],
)
def test_settings_that_cannot_be_met(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        sampling_of(trainer_of(**changes))
