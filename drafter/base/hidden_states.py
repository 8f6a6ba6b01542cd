"""Which hidden states of a forward are handed out: the LM head's input, and the outputs of single layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drafter.errors import LoadError

LM_HEAD_INPUT = -1
"""In a list of hidden layers: what the LM head reads, that is the last layer's output after the final norm."""


class DecoderLayers:
    """The layers of a decoder: their outputs, and the decoder without its last ones.

    Args:
        decoder: The model without its LM head.
        count: How many layers it has.
        name: Of the model, for messages.
    """

    def __init__(self, decoder: nn.Module, count: int, name: str) -> None:
        self._owner, self._attribute, self._name = decoder, "", name
        for path, module in decoder.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                owner, _, self._attribute = path.rpartition(".")
                self._owner = decoder.get_submodule(owner)
                break
        self._outputs: dict[int, Tensor] = {}
        self._watched: set[int] = set()
        self._shortened: dict[int, nn.ModuleList] = {}

    @property
    def modules(self) -> nn.ModuleList:
        """The layers themselves.

        Raises:
            LoadError: They cannot be found in this model.
        """
        if not self._attribute:
            raise LoadError(f"{self._name}: its layers cannot be told apart, so no drafter can read or run single ones")
        layers = getattr(self._owner, self._attribute)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def watch(self, indices: Sequence[int]) -> None:
        """Keep these layers' outputs of each forward, until `take`; `LM_HEAD_INPUT` is not a layer."""
        for index in set(indices) - self._watched - {LM_HEAD_INPUT}:
            self.modules[index].register_forward_hook(self._keeper(index))
            self._watched.add(index)

    def take(self, indices: Sequence[int], head_input: Tensor, device: torch.device) -> Tensor:
        """The hidden states of the last forward side by side, `[..., K · d]`, on `device`.

        Args:
            indices: K layers, or `LM_HEAD_INPUT`.
            head_input: `[..., d]` what the LM head reads.
            device: Where they are read; layers of one model may lie on several.
        """
        outputs, self._outputs = self._outputs, {}
        if not indices:
            return head_input[..., :0].to(device)
        found = [(head_input if index == LM_HEAD_INPUT else outputs[index]).to(device) for index in indices]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    @contextmanager
    def only_first(self, count: int) -> Iterator[None]:
        """For a `with` block, the decoder has only its first `count` layers, and its final norm after them."""
        whole = self.modules
        if count not in self._shortened:
            self._shortened[count] = nn.ModuleList(list(whole)[:count])
        setattr(self._owner, self._attribute, self._shortened[count])
        try:
            yield
        finally:
            setattr(self._owner, self._attribute, whole)

    def _keeper(self, index: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._outputs[index] = output[0] if isinstance(output, tuple) else output

        return keep
