"""Mixers, the parts of recurrent layers that read and change a state, run over prompts and draft trees.

A model's code hands each mixer the hidden states of a forward's nodes. Where they are a tree's, the mixer runs over all
of them at once if its kernels are known for trees (see `tree_mixing`). If not, its own code runs once for each depth: a
node's token alone, from its parent's state, exactly as in plain decoding.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from drafter.errors import LoadError
from drafter.native.build import UnsuitableError
from drafter.target_model.architecture import NO_PLACE
from drafter.target_model.cache import CacheBytes
from drafter.target_model.native_mixers import NativeMixer
from drafter.target_model.nodes import PromptNodes
from drafter.target_model.state_cache import Chosen, Key, LayerStates, States, StateShape, StateView, view_in
from drafter.target_model.tree_mixing import TreeMixing
from drafter.target_model.tree_scan import TreePaths

_log = logging.getLogger(__name__)
_CACHE_NAMES = ("cache", "cache_params", "past_key_values")  # of the argument that has the cache
_UPDATES = {"update_conv_state", "update_recurrent_state"}  # called by all mixers, and by nothing else
_PROBE_PARENTS = torch.tensor([[0, 0, 1, 0, 2, 1, 4], [0, 0, 0, 2, 3, 3, 5]])
"""Parents in two trees that a mixer is tried with; texts that it is tried with have as many tokens."""
_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
_TOLERANCE = 1e-3  # largest difference ÷ the largest number


def state_shapes(layers: Iterable[Any]) -> LayerStates:
    """Return the shapes of the states in the layers of a transformers cache, after a forward of one row."""
    shapes: dict[int, dict[Key, StateShape]] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionLayer):
            states = _states_of(layer)
            if states:
                shapes[number] = {
                    key: StateShape(tuple(one.shape[1:]), one.dtype, one.device) for key, one in states.items()
                }
    return shapes


def find_mixers(
    decoder: nn.Module, shapes: LayerStates, layers: Collection[int], width: int, name: str, kind: str
) -> list[Mixer]:
    """Let `Mixer`s run the `layers` that keep a state, on hidden states of `width` numbers; return them.

    Raises:
        LoadError: A layer's mixer cannot be told.
    """
    unknown = LoadError(f"{name}: {kind} keeps a recurrent state in layers of its own; {NO_PLACE}")
    if set(layers) != shapes.keys():
        raise unknown
    mixers: dict[int, Mixer] = {}
    for module in decoder.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and _UPDATES & set(code.co_names):
            layer = getattr(module, "layer_idx", -1)
            if layer not in shapes or layer in mixers:
                raise unknown
            mixers[layer] = Mixer.of(module)
    if mixers.keys() != shapes.keys():
        raise unknown
    proved: dict[type, Mixer] = {}  # of each class, one mixer
    with torch.inference_mode():
        for layer, mixer in mixers.items():
            try:
                mixer.prove(shapes[layer], width, proved.setdefault(type(mixer.module), mixer))
            except _ERRORS as error:
                raise unknown from error
    return list(mixers.values())


def run_natively(mixers: Iterable[Mixer]) -> None:
    """Let the native library run the mixers for which it has a kernel, with the weights that they have now.

    Raises:
        BuildError: The library cannot be compiled here.
    """
    for mixer in mixers:
        mixer.native = None  # a copy of weights that have changed is freed before another is made
        try:
            mixer.native = NativeMixer(mixer.module, mixer.layer)
        except UnsuitableError as reason:
            _log.debug("the mixer of layer %d runs by its own code: %s", mixer.layer, reason)


def run_by_own_code(mixers: Iterable[Mixer]) -> None:
    """Undo `run_natively`."""
    for mixer in mixers:
        mixer.native = None


class Mixer:
    """Stands in for the forward of a mixer, and leaves all calls to it that have another cache than `TargetCache`'s."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self._forward = module, module.forward
        self._signature = inspect.signature(module.forward)
        self._cache_name = next(name for name in _CACHE_NAMES if name in self._signature.parameters)
        self.layer: int = module.layer_idx  # type: ignore[assignment]
        self._reads_on = False  # its code reads several tokens at once behind others; if not, one after the other
        self.at_once: TreeMixing | None = None  # runs all nodes of a tree; if None, one depth runs after the other
        self._bytes = CacheBytes()  # what its code keeps of a step
        self.native: NativeMixer | None = None  # runs it instead, in every forward

    @staticmethod
    def of(module: nn.Module) -> Mixer:
        """Return the one of this module, which may have been made for another target model of the same weights."""
        if not isinstance(module.forward, Mixer):
            module.forward = Mixer(module)
        return module.forward

    @property
    def waits(self) -> bool:
        """True if it waits for the device where it runs over trees: depth by depth, whose sizes the device knows."""
        return self.at_once is None and self.native is None

    @property
    def reads_on(self) -> bool:
        """True if it reads several tokens at once behind others; if not, it reads one after the other."""
        return self._reads_on or self.native is not None

    @property
    def bytes(self) -> CacheBytes:
        """What it keeps of a step's nodes and rows until the commit."""
        return self._bytes if self.native is None else CacheBytes(node=self.native.node_bytes)

    def __call__(self, *args: Any, **others: Any) -> Any:
        given = self._signature.bind(*args, **others).arguments
        view = view_in(given.get(self._cache_name))
        if view is None:
            return self._forward(*args, **others)
        hidden: Tensor = next(iter(given.values()))
        if self.native is not None:
            return self.native(view, hidden)
        return self._prompts(view, hidden) if isinstance(view.nodes, PromptNodes) else self._tree(view, hidden)

    def prove(self, shapes: Mapping[Key, StateShape], width: int, alike: Mixer) -> None:
        """Find out how it may be run, by random tokens behind random states, in float32.

        Args:
            alike: This mixer, or another one of the same class for which it is known.
        """
        self.native = None
        self._bytes = CacheBytes(node=sum(shape.nbytes for shape in shapes.values()))
        weight = next(self.module.parameters())
        if weight.is_meta:  # where sizes are counted, without numbers
            return
        random, (rows, nodes) = torch.Generator().manual_seed(0), _PROBE_PARENTS.shape
        hidden = torch.randn(rows, nodes, width, generator=random).to(weight.device)
        before = {
            key: torch.randn(rows, *shape.sizes, generator=random).to(shape.device) for key, shape in shapes.items()
        }
        paths, self._reads_on, fits = _probe_paths(hidden.device), alike._reads_on, alike.at_once is not None
        if alike is self:
            exact, self.at_once = Mixer(_exact_copy(self.module)), None
            self._reads_on, fits = exact._reads_on_from_states(hidden, before), exact._fits_trees(hidden, before, paths)
        # accelerate's hook moves weights when a module is called, and this calls the code inside.
        if fits and not hasattr(self.module, "_hf_hook"):
            self.at_once = TreeMixing(self.module, self._cache_name)
            states = {key: one.to(shapes[key].dtype) for key, one in before.items()}
            _, run = self.at_once(hidden.to(weight), states, paths)
            self._bytes = CacheBytes(node=run.node_bytes // (rows * nodes), row=run.row_bytes // rows)

    def _reads_on_from_states(self, hidden: Tensor, states: States) -> bool:
        """Return whether a text in two parts, each read at once, gives what it gives as a whole."""
        nothing, half = dict.fromkeys(states), hidden.shape[1] // 2
        whole, end = self._call(hidden, nothing)
        _, between = self._call(hidden[:, :half], nothing)
        try:
            rest, other_end = self._call(hidden[:, half:], between)
        except _ERRORS:
            return False
        return _alike(rest, whole[:, half:]) and all(_alike(other_end[key], end[key]) for key in end)

    def _fits_trees(self, hidden: Tensor, before: States, paths: TreePaths) -> bool:
        """Return whether a tree at once gives what it gives one depth after the other."""
        (rows, nodes), (expected, after) = hidden.shape[:2], self._by_depth(hidden, _cloned(before), paths)
        every = torch.cartesian_prod(torch.arange(rows), torch.arange(nodes)).to(hidden.device)
        row, node = every.unbind(1)
        try:
            found, run = TreeMixing(self.module, self._cache_name)(hidden, _cloned(before), paths)
            states = {key: chosen(row, node) for key, chosen in run.after.items()}
        except _ERRORS:
            return False
        return (
            states.keys() == after.keys()
            and _alike(found, expected)
            and all(_alike(state, after[key](row, node)) for key, state in states.items())
        )

    def _tree(self, view: StateView, hidden: Tensor) -> Tensor:
        """Run a tree's nodes `[B, N, d]`, or packed `[1, M, d]`, from the states of their parents."""
        packing, before = view.nodes.packing, view.committed(self.layer)
        unpacked = hidden if packing is None else packing.unpack(hidden)
        output, view.cache.nodes[self.layer] = self.run_tree(unpacked, before, view.paths)
        return output if packing is None else packing.pack(output)

    def run_tree(self, hidden: Tensor, before: States, paths: TreePaths) -> tuple[Tensor, dict[Key, Chosen]]:
        """Run nodes `[B, N, d]` behind texts whose states are `before`, which may be overwritten.

        Returns the outputs `[B, N, d]`, and what gives the states after chosen nodes.
        """
        if hidden.shape[1] == 1:  # plain decoding
            output, states = self._call(hidden, before)
            return output, _only_nodes(states)
        if self.at_once is None:
            return self._by_depth(hidden, before, paths)
        output, run = self.at_once(hidden, before, paths)
        return output, run.after

    def _by_depth(self, hidden: Tensor, before: States, paths: TreePaths) -> tuple[Tensor, dict[Key, Chosen]]:
        output, (batch, size) = torch.empty_like(hidden), hidden.shape[:2]
        after = {key: one.new_empty(batch, size, *one.shape[1:]) for key, one in before.items()}
        for depth, level in enumerate(paths.levels):
            row, node = (one.to(hidden.device) for one in level)
            if depth:
                parent = paths.parents.to(hidden.device)[row, node]
                states = {key: one[row, parent] for key, one in after.items()}
            else:
                states = {key: one[row] for key, one in before.items()}
            output[row, node], states = self._one(hidden[row, node], states)
            for key, state in states.items():
                after[key][row, node] = state
        return output, {key: partial(_at, one) for key, one in after.items()}

    def _prompts(self, view: StateView, hidden: Tensor) -> Tensor:
        """Run texts `[1, ΣP, d]` behind those of their rows, and write the states at their ends.

        The last token of a text whose logits are wanted may be committed like the root of a tree, so that the state
        before it is kept, too.
        """
        nodes, cache = view.nodes, view.cache
        assert isinstance(nodes, PromptNodes)
        outputs: list[Tensor] = []
        texts = hidden.split([len(span) for span in nodes.spans], 1)
        for row, (span, text) in enumerate(zip(nodes.spans, texts, strict=True)):
            slot, states = nodes.slot + row, view.committed(self.layer, slice(row, row + 1))
            start = span.start
            for stop in cache.stops(span, nodes.keep):
                if stop > start:
                    piece = text[:, start - span.start : stop - span.start]
                    output, states = self._read(piece, states, first=start == 0)
                    outputs.append(output)
                cache.put_snapshot(slot, self.layer, stop, states)
                start = stop
            before = None
            if nodes.keep:
                before = _cloned(states)
                output, states = self._call(text[:, -1:], states)
                outputs.append(output)
                cache.nodes[self.layer] = _only_nodes(states)
            cache.put(slot, self.layer, before, states)
        return torch.cat(outputs, 1)

    def _read(self, hidden: Tensor, states: States, *, first: bool) -> tuple[Tensor, States]:
        if first:
            return self._call(hidden, dict.fromkeys(states))
        return self._call(hidden, states) if self._reads_on else self._one_by_one(hidden, states)

    def _one_by_one(self, hidden: Tensor, states: States) -> tuple[Tensor, States]:
        outputs = []
        for token in hidden.unbind(1):
            output, states = self._one(token, states)
            outputs.append(output)
        return torch.stack(outputs, 1), states

    def _one(self, hidden: Tensor, states: States) -> tuple[Tensor, States]:
        """Run one token of each text, `[R, d]`."""
        output, states = self._call(hidden[:, None], states)
        return output[:, 0], states

    def _call(self, hidden: Tensor, states: dict[Key, Any]) -> tuple[Tensor, States]:
        """Run the model's code over tokens `[R, n, d]` behind texts of these states, or, if they are None, behind none.

        Returns the outputs `[R, n, d]` and the states after the last token. `states` may be overwritten.
        """
        layer = LinearAttentionLayer(1 + max(number for _, number in states))
        for (kind, number), state in states.items():
            if state is not None:
                _set(layer, kind, number, state)
        cache = Cache(layers=[layer] * (self.layer + 1))
        output: Tensor = self._forward(hidden, **{self._cache_name: cache})
        return output, _states_of(layer)


def _set(layer: LinearAttentionLayer, kind: str, number: int, state: Tensor) -> None:
    """Make a state that of a layer of transformers' cache, as if the layer had come to it itself."""
    if kind == "conv":
        layer.conv_states[number], layer.conv_kernel_size[number] = state, state.shape[-1]
        layer.is_conv_states_initialized[number] = True
    else:
        layer.recurrent_states[number] = state
        layer.is_recurrent_states_initialized[number] = True
    layer.has_previous_state[number] = True
    layer.dtype, layer.device = state.dtype, state.device


def _states_of(layer: LinearAttentionLayer) -> States:
    kinds = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
    return {(kind, number): one for kind, states in kinds for number, one in states.items() if one is not None}


def _cloned(states: States) -> States:
    return {key: one.clone() for key, one in states.items()}


def _at(states: Tensor, row: Tensor, node: Tensor) -> Tensor:
    """Return `[R, ...]` of states `[B, N, ...]`."""
    return states[row, node]


def _only_nodes(states: States) -> dict[Key, Chosen]:
    """Return what chooses among nodes of which each row has one, with states `[B, ...]`."""
    return {key: partial(_at, one[:, None]) for key, one in states.items()}


def _probe_paths(device: torch.device) -> TreePaths:
    rows, nodes = _PROBE_PARENTS.shape
    ancestors, row = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1), torch.arange(rows)
    for node in range(1, nodes):
        ancestors[:, node] |= ancestors[row, _PROBE_PARENTS[:, node]]
    return TreePaths(_PROBE_PARENTS.to(device), ancestors.to(device))


def _exact_copy(module: nn.Module) -> nn.Module:
    """Return a module in float32, with the forward of its class."""
    mixer = vars(module).pop("forward", None)
    try:
        with torch.inference_mode(False):  # whose tensors have no version, which prepacked layers compare
            return copy.deepcopy(module).float()
    finally:
        if mixer is not None:
            module.forward = mixer


def _alike(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().amax() <= _TOLERANCE * other.abs().amax())
