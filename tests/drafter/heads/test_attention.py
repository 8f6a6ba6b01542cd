""""""

from __future__ import annotations

import pytest
import torch

from drafter.drafters.contract import DraftContext, Loan
from drafter.heads.attention import AttentionModule, AttentionReader
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from tests.support.heads import sequence


@pytest.fixture
def module(tiny_base: BaseModel) -> AttentionModule:
    torch.manual_seed(0)
    return AttentionModule(
        tiny_base.hidden_size, num_frames=5, num_layers=2, num_heads=2, intermediate_size=40, rope_theta=1e4
    ).requires_grad_(False)


def test_many_anchors_at_once_equal_one_at_a_time(tiny_base: BaseModel, module: AttentionModule) -> None:
    tokens, hidden = sequence(tiny_base, 2, 20)
    embeddings = tiny_base.embed(tokens)
    anchors = torch.tensor([[0, 3, 19, 7], [5, 5, 1, 18]])
    together = module(embeddings, hidden, anchors)
    for index in range(4):
        alone = module(embeddings, hidden, anchors[:, index : index + 1])
        assert torch.allclose(together[:, index], alone[:, 0], atol=1e-5)


def test_frames_see_the_whole_text_and_nothing_after_it(tiny_base: BaseModel, module: AttentionModule) -> None:
    tokens, hidden = sequence(tiny_base, 1, 16)
    anchors = torch.tensor([[6]])
    frames = module(tiny_base.embed(tokens), hidden, anchors)
    later_tokens, later_hidden = tokens.clone(), hidden.clone()
    later_tokens[:, 7:] = 5
    later_hidden[:, 6:] += 100.0
    assert torch.equal(frames, module(tiny_base.embed(later_tokens), later_hidden, anchors))
    for position in range(7):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 90
        assert not torch.allclose(frames, module(tiny_base.embed(changed), hidden, anchors), atol=1e-5)
    for position in range(6):
        moved = hidden.clone()
        moved[:, position] *= -1.0
        assert not torch.allclose(frames, module(tiny_base.embed(tokens), moved, anchors), atol=1e-5)


def test_every_frame_sees_every_other(tiny_base: BaseModel, module: AttentionModule) -> None:
    tokens, hidden = sequence(tiny_base, 1, 10)
    before = module(tiny_base.embed(tokens), hidden, torch.tensor([[4]]))
    module.slots[-1] *= -1.0
    after = module(tiny_base.embed(tokens), hidden, torch.tensor([[4]]))
    assert bool(((before - after).abs().amax(-1) > 1e-6).all())


def test_a_causal_frame_sees_no_later_one(tiny_base: BaseModel, module: AttentionModule) -> None:
    tokens, hidden = sequence(tiny_base, 1, 10)
    module.causal = True
    embeddings, anchors = tiny_base.embed(tokens), torch.tensor([[4, 7]])
    before = module(embeddings, hidden, anchors)
    module.slots[2] *= -1.0
    after = module(embeddings, hidden, anchors)
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    assert bool(((before - after).abs().amax(-1) > 1e-6)[:, :, 2:].all())


def test_the_first_frames_alone(tiny_base: BaseModel, module: AttentionModule) -> None:
    """They are those of a module without the other frames."""
    tokens, hidden = sequence(tiny_base, 2, 10)
    embeddings, anchors = tiny_base.embed(tokens), torch.tensor([[4, 7], [2, 9]])
    some = module(embeddings, hidden, anchors, 3)
    module.num_frames, module.slots = 3, torch.nn.Parameter(module.slots[:3])
    assert torch.equal(some, module(embeddings, hidden, anchors))


def test_the_cache_is_allocated_once(tiny_base: BaseModel, module: AttentionModule) -> None:
    reader = module.reader(tiny_base, 5)
    assert isinstance(reader, AttentionReader)
    reader.open(Loan(tiny_base, 2, 40, StageTimes()))
    place = reader._cache.data_ptr()
    tokens, hidden = sequence(tiny_base, 2, 40)
    for length in (3, 9, 20, 39):
        context = DraftContext(tokens, hidden, torch.tensor([length, 3]), [length, 3])
        reader.prepare(context)
        reader.read(context)
    assert reader._cache.data_ptr() == place
