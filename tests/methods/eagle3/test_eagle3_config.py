""""""

from __future__ import annotations

from typing import Any

import pytest

from drafter.errors import LoadError
from drafter.heads.checkpoint import new_head
from drafter.methods.eagle3.head import fused_layers
from drafter.target_model.model import BaseModel


@pytest.mark.parametrize(
    ("count", "layers"),
    [(32, (1, 15, 28)), (36, (1, 17, 32)), (8, (1, 3, 4)), (7, (1, 2, 3)), (6, (1, 3, 5)), (3, (0, 1, 2)), (1, (0,))],
)
def test_the_fused_layers_are_the_published_ones_where_there_are_enough(count: int, layers: tuple[int, ...]) -> None:
    assert fused_layers(count) == layers


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hidden_layers": []}, "hidden_layers must name at least one layer"),
        ({"num_heads": 5}, "does not split into 5 heads"),
        ({"head_size": 7}, "heads must have an even width, not 7"),
        ({"num_kv_heads": 3}, "4 heads cannot share 3 heads of keys and values"),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            "rope_scaling 'yarn' is not known: known are default, linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling 'linear' needs 'factor'"),
        ({"draft_vocab_size": 98}, "draft_vocab_size must be from 1 to the size of the vocabulary, 97"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiny_base: BaseModel, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(LoadError, match=reason):
        new_head("eagle3", tiny_base, settings)
