""""""

from __future__ import annotations

import torch
from torch.nn import functional as F

from drafter.methods.eagle3.head import DraftLayer, Eagle3HeadConfig, Projected, Rollout, sees_entries


def test_text_and_draft_have_one_softmax() -> None:
    """Against ordinary attention over both: two texts, three drafts behind each, three nodes of which two are run."""
    torch.manual_seed(0)
    length, size, heads, groups = 5, 4, 4, 2
    texts = [torch.randn(2, length, groups, size) for _ in range(2)]
    own_keys, own_values = torch.randn(6, 3, groups, size), torch.randn(6, 3, groups, size)
    queries = torch.randn(6, 2, heads, size)
    anchors = torch.tensor([0, 2, 4, 1, 3, 3])
    sees_texts = sees_entries(torch.arange(length), anchors)
    sees = torch.tensor([[True, True, False], [False, True, True]]).expand(6, -1, -1)
    layer = DraftLayer(Eagle3HeadConfig(16, 9, hidden_layers=(0,), num_kv_heads=groups))
    pending = Projected(queries[:, 0], own_keys[:, 0], own_values[:, 0], torch.zeros(6, 16))
    rollout = Rollout(layer, texts[0], texts[1], sees_texts, pending, torch.zeros(1, 2, size))
    rollout._keys, rollout._values = own_keys, own_values
    found = rollout.attend(queries, sees)
    for draft in range(6):
        keys, values = (
            torch.cat([one[draft // 3], other[draft]]) for one, other in zip(texts, (own_keys, own_values), strict=True)
        )
        mask = torch.cat([sees_texts[draft].expand(2, -1), sees[draft]], 1)
        query, key, value = (part.transpose(0, 1) for part in (queries[draft], keys, values))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        expected = mixed.transpose(0, 1).flatten(1)
        assert torch.allclose(found[draft], expected, atol=1e-6)


def test_the_first_token_of_a_text_is_an_entry_only_where_there_is_no_other() -> None:
    assert sees_entries(torch.arange(4), torch.tensor([0, 1, 3])).tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [False, True, True, True],
    ]
