"""Makes caches for a target model's layers, within the memory there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafter import devices
from drafter.errors import LoadError
from drafter.target_model.cache import (
    BLOCK,
    SPARE,
    Blocks,
    CacheBytes,
    GrowingBlocks,
    LayerCache,
    TargetCache,
    blocks_of,
)
from drafter.target_model.kv_cache import KVCache, LayerShape
from drafter.target_model.mixers import Mixer
from drafter.target_model.state_cache import LayerStates, StateCache


@dataclass
class CacheFactory:
    """What each of the layers of the model `name` keeps: keys and values of `shapes`, or `states`, or neither.

    `mixers` run the layers with states.
    """

    name: str
    num_layers: int
    shapes: list[LayerShape | None]
    states: LayerStates
    mixers: Sequence[Mixer] = ()

    @property
    def trees_wait(self) -> bool:
        """True if a mixer waits for the device where it runs over trees."""
        return any(mixer.waits for mixer in self.mixers)

    def make(
        self, slots: int, length: int, device: torch.device, memory: int | None = None, layers: int | None = None
    ) -> TargetCache:
        """Allocate a cache; see `BaseModel.new_cache`. `device` holds what the first layer gets."""
        by_device: dict[torch.device, int] = {}
        for shape in self.shapes[:layers]:
            if shape is not None:
                by_device[shape.device] = by_device.get(shape.device, 0) + shape.bytes_per_token
        in_all = sum(by_device.values())
        of_states = self.over(Blocks(1, 1, device), device).bytes
        if memory is not None and (states := slots * of_states.slot + of_states.once):
            if states > memory:
                raise LoadError(
                    f"the recurrent states of {slots:,} slots of {self.name} take {states / 2**30:,.2f} GiB, more than "
                    "the KV cache may: raise kv_gib or lower max_num_seqs"
                )
            memory -= states
        if memory is None or memory >= slots * length * in_all:
            self._refuse_too_large(by_device, slots * length, f"{slots:,} slots of {length:,} positions")
            return self.over(Blocks(slots, length, device), device, layers)
        blocks = memory // (in_all * BLOCK) - SPARE
        if blocks < blocks_of(length):
            raise LoadError(
                f"a KV cache of {memory / 2**30:,.2f} GiB holds {max(blocks, 0) * BLOCK:,} positions of {self.name}, "
                f"and one request may need {length:,}: raise kv_gib or lower max_model_len"
            )
        positions = (blocks + SPARE) * BLOCK
        self._refuse_too_large(by_device, positions, f"{positions:,} positions for all rows together")
        return self.over(GrowingBlocks(slots, length, device, blocks), device, layers)

    def over(self, blocks: Blocks, device: torch.device, layers: int | None = None) -> TargetCache:
        """Return a cache of the first `layers` layers over `blocks`."""
        depth = self.num_layers if layers is None else layers
        return TargetCache(blocks, self.layer_caches(blocks, device, depth), depth)

    def layer_caches(self, blocks: Blocks, device: torch.device, depth: int) -> Sequence[LayerCache]:
        """Return what the first `depth` layers keep; the first is of keys and values."""
        keys_and_values = KVCache(self.shapes[:depth], blocks)
        states = {layer: shapes for layer, shapes in self.states.items() if layer < depth}
        if not states:
            return [keys_and_values]
        mixing = sum((mixer.bytes for mixer in self.mixers), CacheBytes())
        reads_on = all(mixer.reads_on for mixer in self.mixers)
        transposed = {one.layer for one in self.mixers if one.native is not None and one.native.transposed}
        return [keys_and_values, StateCache(states, blocks.slots, device, depth, mixing, reads_on, transposed)]

    def _refuse_too_large(self, sizes: dict[torch.device, int], positions: int, what: str) -> None:
        for device, size in sizes.items():
            free, wanted = devices.free_bytes(device), size * positions
            if free is not None and wanted > free:
                raise LoadError(
                    f"a KV cache of {what} takes {wanted / 2**30:,.1f} GiB beside {self.name}, and {device} has "
                    f"{free / 2**30:,.1f} GiB left: lower max_num_seqs or max_model_len, or kv_gib where it is set"
                )
