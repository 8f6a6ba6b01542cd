from __future__ import annotations

from typing import Any

import pytest

from drafter.errors import LoadError
from drafter.heads.checkpoint import new_head
from drafter.target_model.model import BaseModel


def test_a_new_head_has_the_bases_sizes(tiny_base: BaseModel) -> None:
    config = new_head("medusa", tiny_base, {"depth": 3}).config
    assert (config.hidden_size, config.vocab_size, config.depth) == (32, 97, 3)


@pytest.mark.parametrize(
    ("algorithm", "settings", "words"),
    [
        ("telepathy", {}, "no draft head 'telepathy': known are ctc, eagle3, hydra, imitation"),
        ("medusa", {"num_frames": 3}, "'medusa': unknown configuration key 'num_frames'"),
        ("ctc", {"depth": "deep"}, "'ctc': configuration key 'depth' cannot be 'deep'"),
        ("hydra", {"num_heads": 3, "prefix_attention": True}, "'hydra': hidden_size 32 does not split"),
        (
            "eagle3",
            {"hidden_layers": [0, 9]},
            "'eagle3' reads layer 9 of its target model, .*: name others",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(
    tiny_base: BaseModel, algorithm: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(LoadError, match=words):
        new_head(algorithm, tiny_base, settings)
