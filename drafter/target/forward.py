"""Forwards of the target model: their inputs, the executor interface, and access to single layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafter.errors import LoadError
from drafter.target.kv_cache import KVCache
from drafter.target.packing import Packing

LM_HEAD_INPUT = -1
"""In a list of hidden layers: the LM head's input, that is the last layer's output after the final norm."""


class DecoderLayers:
    """Access to a decoder's layer outputs, and to its first layers alone.

    Args:
        decoder: The model without its LM head.
        count: Its number of layers.
        name: The model's, for messages.
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
        """Keep these layers' outputs of each forward until `take`; `LM_HEAD_INPUT` is ignored."""
        for index in set(indices) - self._watched - {LM_HEAD_INPUT}:
            self.modules[index].register_forward_hook(self._keeper(index))
            self._watched.add(index)

    def take(self, indices: Sequence[int], head_input: Tensor, device: torch.device) -> Tensor:
        """Return hidden states of the last forward, concatenated: `[..., K · d]`, on `device`.

        Args:
            indices: K layers, or `LM_HEAD_INPUT`.
            head_input: `[..., d]` the LM head's input.
            device: Target device; a model's layers may lie on several.
        """
        outputs, self._outputs = self._outputs, {}
        if not indices:
            return head_input[..., :0].to(device)
        found = [(head_input if index == LM_HEAD_INPUT else outputs[index]).to(device) for index in indices]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    @contextmanager
    def only_first(self, count: int) -> Iterator[None]:
        """Truncate the decoder to its first `count` layers and the final norm within a `with` block."""
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


@dataclass(frozen=True)
class TreeNodes:
    """Nodes of one forward. Row `b` of B has `lengths[b]` committed positions before its nodes.

    Args:
        tokens: `[B, N]` int64 node tokens; any valid id in padding.
        lengths: `[B]` int64 committed positions.
        depths: `[B, N]` int64 depth of each node below the root.
        ancestors: `[B, N, N]` bool: entry `[b, i, j]` says that node `j` is node `i` or one of its ancestors.
        kv_length: Cache positions that attention reads; at least every row's length + N.
        packing: The nodes that are not padding, if only these are to be computed.
        hidden_layers: K hidden states to return, concatenated; see `DecoderLayers.take`.
        full: Rows of so many committed positions are empty, and their output is not used. None if no row is.
        follows: Nodes left out of the packing have been run before, and others see them.
    """

    tokens: Tensor
    lengths: Tensor
    depths: Tensor
    ancestors: Tensor
    kv_length: int
    packing: Packing | None = None
    hidden_layers: tuple[int, ...] = (LM_HEAD_INPUT,)
    full: int | None = None
    follows: bool = False


class Executor(Protocol):
    """Runs forwards of the target model over a KV cache. All executors give the same tokens."""

    def verify(self, cache: KVCache, nodes: TreeNodes) -> tuple[Tensor, Tensor]:
        """Run tree nodes of the first B slots; return logits `[B, N, V]` and hidden states `[B, N, K · d]`."""

    def prefill(
        self,
        cache: KVCache,
        slot: int,
        prompts: Sequence[Tensor],
        starts: Sequence[int],
        hidden_layers: tuple[int, ...],
    ) -> Tensor:
        """Run prompts, or chunks, into slots; return their hidden states `[ΣP, K · d]`; see `BaseModel.prefill`."""

    def prefill_last(
        self, cache: KVCache, slot: int, prompt: Tensor, start: int, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Run the last chunk of one prompt; return the logits `[1, V]` after it and its hidden states `[P, K · d]`."""

    def exit_early(self, cache: KVCache, nodes: TreeNodes, layers: int, first: int) -> Tensor:
        """Run only the first layers and the final norm over the nodes from `first` on; see `BaseModel.exit_early`."""
