"""The stages of a step on a GPU: each is queued by one call, as a CUDA graph, and the host may do its part in between.

A stage leaves its result in buffers that never move, and the next one begins there. So a tree that the host has made or
changed, a guide's masks and log-probabilities cost their own work, and no graph.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from drafter import devices
from drafter.acceptance.contract import Verified
from drafter.drafters.contract import Ask, DraftContext
from drafter.engine.cuda_graph import CudaRecorder, Part, PartGraphs
from drafter.engine.step import NOTHING, DeviceStep, StepTensors, Wanted, wanted_logprobs, wants_drawn
from drafter.tree.token_tree import PADDING, TokenTree

_ALL = -1  # a word of a mask with all its bits
_LEAST_KV = 64
_NODES = (0, 3, 5, 7, 9, 11, 15, 23, 31, 47, 63)  # draft tokens of a row in trees that no graph has made


class _Buffers:
    """Tensors `[B, N, ...]` by name, each at the start of memory for at most `rows` and `size`.

    The memory is allocated when it is first written, by a step that runs as it is: its type is known then.
    """

    def __init__(self, rows: int, size: int) -> None:
        self._most = rows * size
        self._memory: dict[str, Tensor] = {}

    def place(self, name: str, rows: int, size: int) -> Tensor:
        """Return the tensor `[rows, size, ...]` of this name."""
        memory = self._memory[name]
        return memory[: rows * size].view(rows, size, *memory.shape[1:])

    def put(self, name: str, value: Tensor) -> None:
        self._room(name, value, *value.shape[:2]).copy_(value)

    def put_padded(self, name: str, value: Tensor, rows: int, size: int, padding: float) -> None:
        """Put a tensor of fewer rows and nodes, with `padding` up to `[rows, size, ...]`."""
        place = self._room(name, value, rows, size)
        if value.shape[:2] != (rows, size):
            place.fill_(padding)
        place[: len(value), : value.shape[1]] = value

    def _room(self, name: str, value: Tensor, rows: int, size: int) -> Tensor:
        if name not in self._memory:
            self._memory[name] = torch.zeros(self._most, *value.shape[2:], dtype=value.dtype, device=value.device)
        return self.place(name, rows, size)


class _Trees(NamedTuple):
    """Trees in the buffers, which are being verified."""

    rows: int
    size: int
    kv_length: int


class QueuedStep:
    """The stages of `step`, each of which is repeated as a graph once it has been recorded.

    Rows and draft tokens are rounded up, so that there are few shapes; what is added is padding.

    Args:
        recorder: None where nothing can be recorded, such as on several GPUs.
    """

    def __init__(self, step: DeviceStep, recorder: CudaRecorder | None) -> None:
        self._step, self.state, self.graphs = step, step.state, PartGraphs(recorder)
        self._most = step.state.spec.max_nodes
        self._buffers = _Buffers(step.state.slots, 1 + self._most)
        # What a recurrent layer's commit reads of the forward is nowhere but in the memory of the same graph.
        self._together = bool(step.base.cache_bytes.node)
        self._drafted: TokenTree | None = None  # the last trees of `draft` that are in the buffers

    def draft(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Return trees `[B, 1 + N]` of the rows of `context`, and of padding; valid until the next step."""
        spec, nodes, capacity = self._step.choices[ask.member].spec, ask.nodes, self.state.capacity
        if nodes and not spec.graph_safe:
            return self._step.draft(context, ask)
        rows, length = padded_rows(len(context.host_lengths), self.state.slots), capacity
        if nodes and spec.bounded:
            # Where attention reads each row to its end, the little work of a drafter is no reason for many graphs.
            rounded = coarse_length if self._reads_to_length else padded_length
            length = rounded(self._reach(context.longest, nodes), capacity)

        def work() -> None:
            bounded = self.state.bounded_context(rows, length - nodes - 1)
            self._put(self._step.draft(bounded, Ask(nodes, member=ask.member)), rows, 1 + nodes)

        self.graphs.run(Part(("draft", ask.member, nodes > 0), (rows, nodes, length)), work)
        self._drafted = self._tree(rows, 1 + nodes)
        return self._drafted

    def verify(self, tree: TokenTree, kv_length: int) -> _Trees:
        """Queue the target model's forward over `tree` `[B, N]`, of `draft` or made by the host; see `DeviceStep`."""
        rows, size = tree.tokens.shape
        if tree is not self._drafted:
            rows, size = padded_rows(rows, self.state.slots), 1 + padded_nodes(size - 1, self._most)
            self._put(tree, rows, size)
        reach = self._reach(kv_length - tree.size, size - 1)
        length = self.state.capacity
        trees = _Trees(rows, size, length if self._reads_to_length else padded_length(reach, length))
        if not self._together:
            self.graphs.run(Part(("verify", size > 1), trees), lambda: self._forward(trees))
        return trees

    def finish(
        self, trees: _Trees, rows: slice, wanted: Wanted = NOTHING, allowed: Tensor | None = None
    ) -> StepTensors:
        """See `DeviceStep.finish`. The result has more rows, and is valid until the next step."""
        step, mode, table = self._step, self.state.mode, self.state.sampling
        if allowed is not None:
            sent = devices.send_beside(allowed, step.base.device)  # under the forward
            self._buffers.put_padded("allowed", sent, trees.rows, trees.size, _ALL)

        def work(wanted: Wanted = NOTHING) -> StepTensors:
            if self._together:
                self._forward(trees)
            return step.finish(self._verified(trees, guided=allowed is not None), slice(0, trees.rows), wanted)

        if wants_drawn(wanted):
            return work(wanted)  # what tokens are drawn from is gone once they are committed
        kind = ("finish", mode, trees.size > 1, allowed is not None)
        sizes = table.sizes if mode.biased or mode.limited else ()
        tensors: StepTensors = self.graphs.run(Part(kind, (trees if self._together else trees[:2], sizes)), work)
        if not wanted:
            return tensors
        path, tokens = tensors.path, tensors.tokens.clamp_min(0)  # those of a row that is not sound are no tokens
        logits = self._buffers.place("logits", trees.rows, trees.size)
        return replace(tensors, logprobs=wanted_logprobs(logits, path, tokens, wanted))

    def whole(self, rows: int, nodes: int, longest: int, member: int = 0) -> StepTensors:
        """Do a step of the first `rows` slots, of at most `longest` tokens, without the host."""
        tree = self.draft(self.state.context([longest] * rows), Ask(nodes, 1 / (nodes + 1), member))
        return self.finish(self.verify(tree, longest + tree.size), slice(0, rows))

    @property
    def _reads_to_length(self) -> bool:
        """True if attention reads each row to its own length, whatever length is said."""
        return self._step.base.reads_to_length and self.state.cache.blocks.in_order

    def _reach(self, longest: int, nodes: int) -> int:
        return min(longest, self.state.max_length) + nodes + 1

    def _put(self, tree: TokenTree, rows: int, size: int) -> None:
        for (name, part), padding in zip(vars(tree).items(), PADDING, strict=True):
            self._buffers.put_padded(name, part, rows, size, padding)
        if len(tree.tokens) < rows:
            self._buffers.place("tokens", rows, size)[len(tree.tokens) :, 0] = 0  # a root is a token

    def _tree(self, rows: int, size: int) -> TokenTree:
        return TokenTree(**{field.name: self._buffers.place(field.name, rows, size) for field in fields(TokenTree)})

    def _forward(self, trees: _Trees) -> None:
        """Run the target model over the trees in the buffers, and leave there what comes of it."""
        verified = self._step.verify(self._tree(trees.rows, trees.size), trees.kv_length)
        for name in ("logits", "hidden", "read"):
            if (value := getattr(verified, name)) is not None:
                self._buffers.put(name, value)

    def _verified(self, trees: _Trees, *, guided: bool) -> Verified:
        rows, size = trees[:2]
        tree, depth = self._tree(rows, size), min(self.state.spec.max_depth, size - 1)
        names = ["logits", "hidden"]
        if self._step.verifier.hidden_layers:
            names.append("read")
        if guided:
            names.append("allowed")
        held = {name: self._buffers.place(name, rows, size) for name in names}
        return Verified(tree, tree.ancestors(depth), depth, **held)


def padded_rows(rows: int, slots: int) -> int:
    """Round up to 1, 2, 4, 8, 16, 24, 32, … or all slots: few shapes, little padding."""
    return min(1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8, slots)


def padded_nodes(nodes: int, most: int) -> int:
    """Round up draft tokens to one of few numbers."""
    return min(next((count for count in _NODES if count >= nodes), most), most)


def padded_length(length: int, most: int) -> int:
    """Round up to 64, 96, 128, 192, 256, 384, …: few shapes, and at most half as much padding as text."""
    size = _LEAST_KV
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, most)


def coarse_length(length: int, most: int) -> int:
    """Round up to 64, 256, 1,024, …: fewer shapes, where padding costs little."""
    size = _LEAST_KV
    while size < length:
        size *= 4
    return min(size, most)
