from __future__ import annotations

import pytest
import torch

from drafter.methods.hydra.head import HydraHead, HydraHeadConfig
from drafter.target_model.model import BaseModel
from tests.support.heads import DEPTH, make_head, sequence
from tests.support.trees import nodes


def test_hydras_probabilities_are_its_heads_along_the_path(tiny_base: BaseModel) -> None:
    """Each node's probability is the product of the heads' probabilities given the tokens before."""
    head = make_head(tiny_base, "hydra")
    assert isinstance(head, HydraHead)
    tokens, hidden = sequence(tiny_base, 1, 8)
    tree = nodes(head.trees_at(tiny_base, tokens, hidden, torch.tensor([[5]]), 9), 0, DEPTH)
    assert len(tree) == 8
    for path, prob in tree.items():
        expected = 0.0
        for depth, token in enumerate(path):
            known = torch.tensor([int(tokens[0, 5]), *path[:depth]])
            told = head.embedding_norm(tiny_base.embed(known)).flatten()
            said = tiny_base.lm_head(head.norm(head.heads[depth](hidden[0, 4], told)))
            expected += float(said.log_softmax(-1)[token])
        assert prob == pytest.approx(float(torch.tensor(expected).exp()), rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"depth": 0}, "depth"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_heads": 3, "prefix_attention": True}, "even width"),
    ],
)
def test_hydras_sizes_that_do_not_fit_are_refused(wrong: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HydraHeadConfig(hidden_size=32, vocab_size=97, **wrong)  # type: ignore[arg-type]
