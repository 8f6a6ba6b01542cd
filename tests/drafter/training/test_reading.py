"""Training reads texts as the engine reads and decodes them, with the images of their prompts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.errors import RequestError
from drafter.parts.learning import EndedRow
from drafter.prompt import Prompt
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.training.reading import hidden_states, with_hidden_states
from drafter.training.targets import RegeneratedText, base_hidden_states
from tests.drafter.target_model.test_images import QUICK, requests
from tests.support.heads import make_head
from tests.support.images import model_of, prompts_of, seeing_base
from tests.support.marks import slow_but
from tests.support.models import SpellingTokenizer, decode, tokens_of


class Tap:
    """Keeps the hidden states of ended rows."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], Tensor] = {}

    def wants(self, row: EndedRow, nbytes: int) -> bool:
        return True

    def put(self, row: EndedRow, hidden: Tensor | None, arrived: torch.cuda.Event | None) -> None:
        if arrived is not None:
            arrived.synchronize()
        assert hidden is not None
        self.rows[*row.prompt, *row.output] = hidden.clone()


@pytest.mark.parametrize("family", slow_but(QUICK[:2], [*QUICK, "qwen2_vl", "idefics3"]))
def test_states_are_those_with_which_the_engine_has_drafted(family: str) -> None:
    """Of rows with none to three images, of which two have the same words."""
    target, tap = seeing_base(family), Tap()
    drafter = make_head(target, "ctc").drafter(target, 7)
    config = EngineConfig(max_num_seqs=4, num_draft_tokens=7)
    engine = Engine(target, drafter, SpellingTokenizer(), config, tap=tap)
    answers = tokens_of(decode(engine, requests(family)))
    texts = [text_of(prompt, answer) for prompt, answer in zip(prompts_of(family), answers, strict=True)]
    for text, states in zip(texts, hidden_states(target, texts, (LM_HEAD_INPUT,)), strict=True):
        assert len(states) == len(text.tokens)
        decoded = tap.rows[tuple(text.tokens)]
        torch.testing.assert_close(states[:-1].cpu(), decoded[:-1], atol=1e-3, rtol=1e-3)


def test_images_change_the_states_of_the_answer() -> None:
    target, (one, two, *_) = seeing_base("llava"), prompts_of("llava")
    answer = [40, 41, 42]
    (seen,), (other,) = (hidden_states(target, [text_of(prompt, answer)], (0, LM_HEAD_INPUT)) for prompt in (one, two))
    unseen = base_hidden_states(target, torch.tensor([[*one.ids, *answer]], device=target.device), (0, LM_HEAD_INPUT))
    assert seen.shape == unseen[0].shape
    for states in (other, unseen[0]):
        assert (seen - states)[len(one.ids) :].abs().amax() > 0.1


def test_a_batch_has_the_states_of_all_texts_or_of_none() -> None:
    target, (one, _, words, *_) = seeing_base("llava"), prompts_of("llava")
    texts = [text_of(one, [40, 41]), text_of(words, [40, 41])]
    layers = (LM_HEAD_INPUT,)
    found = with_hidden_states(target, texts, layers, torch.bfloat16)
    expected = hidden_states(target, texts, layers)
    for text, states in zip(found, expected, strict=True):
        assert text.look is None
        assert text.hidden is not None
        assert torch.equal(text.hidden, states.to(torch.bfloat16))
    assert with_hidden_states(target, texts[1:], layers, torch.bfloat16) == texts[1:]
    with pytest.raises(RequestError, match="reads text alone"):
        hidden_states(BaseModel(model_of("llava")), texts, layers)


def text_of(prompt: Prompt, answer: list[int]) -> RegeneratedText:
    look = (lambda: prompt) if prompt.inputs else None
    return RegeneratedText([*prompt.ids, *answer], len(prompt.ids), look=look)
