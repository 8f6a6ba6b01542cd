from __future__ import annotations

import pytest

from drafter.errors import PromptTooLongError
from drafter.text.tokenizers import refuse_endless


def test_a_text_that_cannot_be_short_enough_is_refused_before_it_is_tokenised() -> None:
    refuse_endless("x" * 4_000, max_length=100, longest=10)
    complaint = "the prompt has 4001 characters, but prompt and output together may have 100 tokens"
    with pytest.raises(PromptTooLongError, match=complaint):
        refuse_endless("x" * 4_001, max_length=100, longest=10)
