"""EAGLE-3's layer in decoding: keys and values of every slot's known text, made of the base's hidden states.

What a draft computes of its own nodes is thrown away with the draft. When their tokens are committed, the base has
hidden states of them, and the entries are made of these, as published.
"""

from __future__ import annotations

from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import DraftContext
from drafter.heads.eagle3.draft_layer import DraftLayer, KnownTexts, Projected
from drafter.heads.eagle3.eagle3_config import Eagle3HeadConfig
from drafter.heads.eagle3.fusion import Fusion
from drafter.heads.eagle3.rollout import Rollout, sees_entries
from drafter.heads.modules.context_reader import CacheShape, ContextReader, Entries
from drafter.heads.modules.rotary import rotation_table


class Eagle3Reader(ContextReader):
    """Reads each sequence's new tokens into the cache, and starts drafts behind them.

    Args:
        config: Of the head.
        fusion: From the base's hidden states to one, on the base's device and in its dtype.
        layer: The decoder layer, likewise.
        base: Lends its embedding.
        fresh: Tokens that an ordinary step adds to a sequence at most.
    """

    def __init__(
        self, config: Eagle3HeadConfig, fusion: Fusion, layer: DraftLayer, base: BaseModel, fresh: int
    ) -> None:
        # Places behind the pending token are not written to, but the drafts have positions there.
        super().__init__(base, fresh, CacheShape(1, config.kv_heads, config.head_width, behind=config.depth))
        self._config, self._fusion, self._layer = config, fusion, layer

    def rollout(self, context: DraftContext) -> Rollout:
        """Read the new entries and return drafts that start at the pending tokens, one for each row."""
        rows = context.tokens.shape[0]
        entries, ends = self._recent(rows)
        new = self._read(context, entries)
        keys, values = self._texts(rows, context.longest + 1)[0]
        sees = sees_entries(self._place[: keys.shape[1]], context.lengths)
        return Rollout(self._layer, KnownTexts(keys, values, sees), new[ends])

    def rotation(self, positions: Tensor) -> Tensor:
        """Return cosine and signed sine `[..., 2, D]` at positions `[...]`."""
        return self._rotation[positions]

    def _rotation_table(self, length: int) -> Tensor:
        return rotation_table(self._config.rotary_rates(self._base.device), length, self._base.dtype)

    def _remember(self, context: DraftContext, entries: Entries) -> None:
        self._read(context, entries)

    def _read(self, context: DraftContext, entries: Entries) -> Projected:
        positions, embeddings, hidden = self._inputs(context, entries)
        new = self._layer.project(embeddings, self._fusion(hidden), self._rotation[positions])
        self._store(positions + entries.slots * self._length, 0, new.keys[None], new.values[None])
        return new
