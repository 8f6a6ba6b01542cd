"""The attention draft module in decoding: frames behind a KV cache of the fused context."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.base.prefix_attention import Prefix, parts_of, prefix_attention_agrees, prefix_attention_on
from drafter.drafters.contract import DraftContext
from drafter.heads.modules.attention_layers import AttentionLayers
from drafter.heads.modules.context_reader import CacheShape, ContextReader, Entries
from drafter.heads.modules.contract import FrameReader


class AttentionReader(ContextReader, FrameReader):
    """Reads each sequence's new tokens into the cache and computes the frames.

    Args:
        module: The layers, on the base's device and in its dtype.
        base: Lends its embedding.
        fresh: Tokens that an ordinary step adds to a sequence at most.
    """

    def __init__(self, module: AttentionLayers, base: BaseModel, fresh: int) -> None:
        size = module.width // module.num_heads
        super().__init__(base, fresh, CacheShape(len(module.layers), module.num_heads, size, module.num_frames))
        self._module = module
        attend = prefix_attention_on(base.device, base.dtype)
        # Where all frames of a text see the same of it, they need no mask if something reads to its end.
        proved = (
            attend is not None
            and not module.causal
            and prefix_attention_agrees(attend, module.num_heads, size, base.device, base.dtype)
        )
        self._attend, self.bounded = (attend, False) if proved else (None, True)

    def _rotation_table(self, length: int) -> Tensor:
        return self._module.rotation(length, self._base.device, self._base.dtype)

    def read(self, context: DraftContext, count: int | None = None) -> Tensor:
        """Read the new entries and return the first `count` frames, or all, `[B, F, d]`."""
        module, rows = self._module, context.tokens.shape[0]
        frames = count or module.num_frames
        entries, ends = self._recent(rows)
        positions, fused = self._fused(context, entries)
        ahead = context.lengths[:, None] + torch.arange(1, frames + 1, device=positions.device)
        # The frames' own keys and values go behind the pending token's, where later entries overwrite them.
        places = torch.cat(
            [positions + entries.slots * self._length, (ahead + self._slot[:rows, None] * self._length).flatten()]
        )
        seen: Tensor | Prefix
        if self._attend is not None:
            parts = parts_of(rows, module.num_heads, frames, self._length)
            lengths, texts = context.lengths + (frames + 1), self._cache
            seen = Prefix.of(lengths, self._length, parts, self._attend, frames, some=True)
        else:
            texts = self._texts(rows, context.longest + 1 + frames)
            last = ahead if module.causal else ahead[:, -1:]
            seen = (self._place[: texts.shape[3]] <= last[:, :, None])[:, None]

        def memory(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self._store(places, layer, keys, values)
            return texts[layer, 0], texts[layer, 1]

        rotation = self._rotation[torch.cat([positions, ahead.flatten()])]
        return module.frames(fused[None], fused[None, ends], frames, rotation[None], seen, memory)[0]

    def _remember(self, context: DraftContext, entries: Entries) -> None:
        """Read entries without computing frames after them."""
        positions, fused = self._fused(context, entries)
        store = partial(self._store, positions + entries.slots * self._length)
        self._module.remember(fused[None], self._rotation[positions][None], store)

    def _fused(self, context: DraftContext, entries: Entries) -> tuple[Tensor, Tensor]:
        """Return the positions `[E]` of entries and the fused entries `[E, d]`."""
        positions, embeddings, hidden = self._inputs(context, entries)
        return positions, self._module.fuse(embeddings, hidden)
