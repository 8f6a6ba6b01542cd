from __future__ import annotations

from drafter import SamplingParams, SpeculativeLM
from pipeline.generate.prompts import PromptSettings
from pipeline.generate.rollout import ProgramRow, Rollout
from pipeline.io.listing import PromptSource
from pipeline.settings import ReadingConfig
from tests.support.waiting import PATIENCE


def test_the_program_writes_judges_and_mends() -> None:
    with SpeculativeLM.from_pretrained(drafter="none", num_draft_tokens=0, max_num_seqs=2) as lm:
        source = PromptSource("", "program")
        settings = PromptSettings("", False, source, ReadingConfig(), SamplingParams(), lm.max_length)
        start = Rollout("examples.mending:write_judge_mend", settings, PATIENCE, frozenset()).starter(lm)
        answer = start(ProgramRow("a", {"prompt": "Name a fruit."}, SamplingParams())).result()
    assert '"answer": ' in answer.columns
    assert answer.valid in (True, False)
    # Each judge but the last one, which was content, is followed by a mend.
    assert 2 <= len(answer.calls) <= 6
    assert len(answer.calls) % 2 == 0
    assert all(call.num_cached_tokens > 0 for _, call in answer.calls[1:])
