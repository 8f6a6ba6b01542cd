"""`SpeculativeLM` with a head that learns."""

from __future__ import annotations

import pytest

from drafter import SpeculativeLM
from drafter.acceptance.settings import VerifierSettings
from drafter.engine.config import EngineConfig
from drafter.errors import LoadError
from drafter.methods.learning.drafter import Learning, changing_head, load_start, weights_of
from drafter.methods.learning.rows import SampleTap
from drafter.methods.learning.settings import StartingHead
from tests.support.models import tokens_of


def test_learning_is_refused_where_it_could_not_learn_or_would_not_draft() -> None:
    lenient, start = VerifierSettings(name="typical"), StartingHead()
    with pytest.raises(LoadError, match="learns from what its target model says itself"):
        SpeculativeLM.from_pretrained(device="cpu", learning=Learning(start), verifier=lenient)
    with pytest.raises(LoadError, match="leave num_draft_tokens at auto"):
        SpeculativeLM.from_pretrained(device="cpu", learning=Learning(start), config=EngineConfig(num_draft_tokens=8))
    with pytest.raises(LoadError, match="has no head that could learn"):
        SpeculativeLM.from_pretrained(device="cpu", drafter="ngram", learning=Learning(start))


@pytest.mark.slow
def test_what_is_generated_is_learnt_from_and_new_weights_are_drafted_with() -> None:
    start, prompts = StartingHead("ctc"), ["Tom has 3 boxes of pens.", "A train goes 60 miles an hour.", "12 + 12 ="]
    config = EngineConfig(max_num_seqs=2, num_draft_tokens=8)
    with SpeculativeLM.from_pretrained(drafter="none", device="cpu", config=config) as lm:
        expected = tokens_of(lm.generate(prompts, max_new_tokens=32))
    with SpeculativeLM.from_pretrained(
        drafter="ctc", device="cpu", learning=Learning(start), config=config
    ) as learning:
        assert tokens_of(learning.generate(prompts, max_new_tokens=32)) == expected
        assert isinstance(learning.samples, SampleTap)
        samples = learning.samples.take(1 << 30)
        assert sorted(one.tokens.tolist()[one.prompt_length :] for one in samples) == sorted(expected)
        changing_head(learning.engine.drafter).offer(1, weights_of(load_start(start, learning.base)))
        found = learning.generate(prompts, max_new_tokens=32)
        assert tokens_of(found) == expected
        assert [one.drafter_versions for one in found] == [[1]] * 3
        assert learning.engine.state().drafter_version == 1
