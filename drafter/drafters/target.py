"""What drafters and draft heads use of a target model: a device that only drafts has no more of it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class OutputLayer(Protocol):
    """Frozen layer from states to logits of V tokens: a `Target`'s, or the rows of a draft vocabulary."""

    @property
    def lm_head_weight(self) -> Tensor: ...

    @property
    def lm_head_bias(self) -> Tensor | None: ...

    def lm_head(self, hidden: Tensor) -> Tensor: ...


class Target(OutputLayer, Protocol):
    """Embeddings, LM head and sizes of a target model. `BaseModel` has the members of these names."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def fingerprints(self) -> frozenset[str]: ...

    @property
    def weights_version(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    def embed(self, tokens: Tensor) -> Tensor: ...
