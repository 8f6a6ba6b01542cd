"""Which hidden states of a forward are handed out: the LM head's input, and the outputs of single layers."""

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


# ---- What runs the base's forward: the model's own code as it is, compiled, or something faster.


@dataclass(frozen=True)
class TreeNodes:
    """The nodes of one forward. Row `b` of B has `lengths[b]` committed positions before its nodes.

    Args:
        tokens: `[B, N]` int64 node tokens; any valid id in padding.
        lengths: `[B]` int64 committed positions.
        depths: `[B, N]` int64 depth of each node below the root.
        ancestors: `[B, N, N]` bool: entry `[b, i, j]` says that node `j` is node `i` or one of its ancestors.
        kv_length: Cache positions that attention reads; at least every row's length + N.
        packing: Which nodes are not padding, if only these are to be computed.
        hidden_layers: K hidden states to return, side by side; see `DecoderLayers.take`.
        full: Rows of so many committed positions are empty: what their nodes see does not matter. None if none are.
        follows: Whether nodes that the packing leaves out have been run before, and are seen by others.
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
    """Runs forwards of a base over a KV cache. All of them give the same tokens."""

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
        """Run prompts, or pieces of them, into slots; return their hidden states `[ΣP, K · d]`.

        Args:
            cache: Holds the committed positions on which each prompt follows.
            slot: Where the first one goes to; the others follow it.
            prompts: Each `[P]`, at least one token.
            starts: Position of each one's first token.
            hidden_layers: Which K hidden states to return; see `DecoderLayers.take`.
        """

    def prefill_last(
        self, cache: KVCache, slot: int, prompt: Tensor, start: int, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Run the last piece of one prompt; return the logits `[1, V]` after it and its hidden states `[P, K · d]`."""

    def exit_early(self, cache: KVCache, nodes: TreeNodes, layers: int, first: int) -> Tensor:
        """Run only the first layers, and the final norm, over the nodes from `first` on; see `BaseModel.exit_early`."""
