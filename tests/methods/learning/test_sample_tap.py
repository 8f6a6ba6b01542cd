"""What an engine hands out of rows that end: their tokens, and the hidden states that it had anyway."""

from __future__ import annotations

import pickle

import pytest
import torch

from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.methods.learning.rows import RowSample, SampleTap
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.parts.learning import EndedRow
from drafter.requests import Generation, Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.training.targets import base_hidden_states
from tests.support.heads import make_head
from tests.support.models import SpellingTokenizer, decode, random_prompts


def run(base: BaseModel, tap: SampleTap, kind: str = "context 2") -> list[Generation]:
    drafter = make_head(base, kind).drafter(base, 8) if kind else NgramDrafter(8)
    engine = Engine(
        base, drafter, SpellingTokenizer(), EngineConfig(max_num_seqs=3, num_draft_tokens=8, max_model_len=96), tap=tap
    )
    requests = [
        Request(prompt, SamplingParams(4 + row, temperature=0.8 * (row % 2), seed=row), str(row))
        for row, prompt in enumerate(random_prompts(8, seed=3))
    ]
    return decode(engine, requests)


@pytest.mark.parametrize("kind", ["context 2", "eagle3", ""])
def test_rows_come_with_the_hidden_states_that_the_base_has_of_them(tiny_base: BaseModel, kind: str) -> None:
    tap = SampleTap()
    made = run(tiny_base, tap, kind)
    samples: dict[str, RowSample] = {one.request_id: pickle.loads(pickle.dumps(one)) for one in tap.take(1 << 40)}
    assert set(samples) == {one.request_id for one in made}
    prompts = random_prompts(8, seed=3)
    for one in made:
        sample = samples[one.request_id]
        assert sample.tokens.tolist() == [*prompts[int(one.request_id)], *one.token_ids]
        assert sample.prompt_length == one.num_prompt_tokens
        if not kind:
            assert sample.hidden is None
            continue
        assert sample.hidden is not None
        layers = make_head(tiny_base, kind).hidden_layers
        expected = base_hidden_states(tiny_base, sample.tokens[None], layers)[0]
        assert sample.hidden.shape == expected.shape
        torch.testing.assert_close(sample.hidden[:-1], expected[:-1], rtol=1e-3, atol=1e-3)
    assert tap.take(1 << 40) == []


def test_nothing_is_handed_out_while_it_pauses(tiny_base: BaseModel) -> None:
    tap = SampleTap()
    run(tiny_base, tap)
    tap.pause()
    assert tap.take(1 << 40) == []
    assert not tap.wants(ended("a"), 0)
    tap.resume()
    assert tap.wants(ended("a"), 0)


def ended(name: str, output: int = 8) -> EndedRow:
    return EndedRow(name, [5, 6], list(range(output)))


def test_where_there_is_little_room_the_newest_rows_stay() -> None:
    hidden = torch.zeros(10, 4)
    tap = SampleTap(3 * (hidden.nbytes + 8 * 10))
    for name in "abcd":
        assert tap.wants(ended(name), hidden.nbytes)
        tap.put(ended(name), hidden, None)
    assert not tap.wants(ended("e", output=80), 80 * 16)  # nothing would be copied for it
    assert [one.request_id for one in tap.take(1)] == ["d"]
    assert [one.request_id for one in tap.take(1 << 20)] == ["c", "b"]
