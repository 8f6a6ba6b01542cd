"""The rows that are decoded, as the device has them: texts, KV cache, hidden states, settings, and what a step does.

Row `i` is what slot `i` holds. Nothing here knows of requests, and nothing waits for a GPU: `Engine` does both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter import devices
from drafter.base.causal_lm import BaseModel
from drafter.base.executors.contract import TreeNodes
from drafter.base.packing import Packing
from drafter.drafters.contract import DraftContext, Drafter
from drafter.engine.cuda_graphs import StepReport, StepShape, padded_length, padded_rows
from drafter.engine.sequence import Ids
from drafter.requests import SamplingParams
from drafter.tree.token_tree import TokenTree, root_only
from drafter.verifiers.choices import SamplingMode, SamplingTable, choose
from drafter.verifiers.exact import Walk, walk
from drafter.verifiers.path_logprobs import PathLogprobs, path_logprobs
from drafter.verifiers.penalties import History


@dataclass(frozen=True)
class Verdict:
    """What the base says to a step's trees.

    Args:
        walk: The way down each tree.
        hidden: `[B, N, d]` the nodes' hidden states.
        logprobs: Of the rows that asked for them; None if none did.
    """

    walk: Walk
    hidden: Tensor
    logprobs: PathLogprobs | None


class Rows:
    """Buffers for `slots` rows, allocated once, and the parts of a step over them.

    Args:
        base: The base model.
        drafter: Proposes trees.
        slots: Rows at most.
        max_length: Prompt and output tokens of a row.
        packs: Whether trees of different sizes are verified without their padding, where the base can.

    Attributes:
        tokens: `[S, L]` int64 prompt, output and the pending token of each row.
        hidden: `[S, L, d]` the base's last hidden states; None if the drafter does not read them.
        lengths: `[S]` int64 committed tokens. An empty slot counts as full, so that a step that runs over it writes
            behind every text.
        cache: The base's keys and values.
        capacity: L; behind `max_length` tokens there is room for draft nodes and the stale ends of a path, which are
            never read.
        mode: What sampling needs for the rows of now.
        logprobs: Rows that want log-probabilities → of how many of the most probable tokens.

    Raises:
        LoadError: The device has no room for the cache.
    """

    def __init__(self, base: BaseModel, drafter: Drafter, slots: int, max_length: int, *, packs: bool) -> None:
        self.base, self.drafter, self.slots, self.max_length = base, drafter, slots, max_length
        # A multiple of eight, as a GPU's kernels want masks to be.
        self.capacity = -(-(max_length + drafter.tree_size + drafter.depth + 1) // 8) * 8
        device = base.device
        self.cache = base.new_cache(slots, self.capacity)
        self.tokens = torch.zeros(slots, self.capacity, dtype=torch.long, device=device)
        self.hidden = (
            torch.zeros(slots, self.capacity, base.hidden_size, dtype=base.dtype, device=device)
            if drafter.reads_hidden
            else None
        )
        self.lengths = torch.full((slots,), max_length, dtype=torch.long, device=device)
        self._offsets = torch.arange(drafter.depth + 1, device=device)
        self._sampling = SamplingTable.empty(slots, max_length, device)
        drafter.allocate(slots, self.capacity)
        self.packs_prompts = base.allow_packing()
        self.packs = packs and self.packs_prompts
        self.mode = SamplingMode.of([])
        self.logprobs: dict[int, int] = {}

    # ---- what is in the slots

    def enter(self, row: int, text: Ids, sampling: SamplingParams, prompt_length: int, limit: int) -> None:
        """Put a text, of which nothing has been read, into an empty slot; `limit` is of its output."""
        self.tokens[row, : len(text)] = devices.send(torch.from_numpy(text), self.base.device)
        self._sampling.set(row, sampling, prompt_length, limit)
        self.drafter.admit(row)

    def begin(self, row: int, length: int) -> None:
        """The first `length` tokens have been read; the next one is pending, and the row is decoded from now on."""
        self.lengths[row] = length

    def end(self, row: int) -> None:
        """The slot is empty."""
        self.lengths[row] = self.max_length

    def restore(self, lengths: Sequence[int]) -> None:
        """The first rows have these lengths, as before a step that failed or was a trial; the other slots are empty.

        A step writes behind a row's committed tokens and moves its length last. So whatever part of the step was done,
        the rows are as they were once their lengths are.
        """
        self.lengths.fill_(self.max_length)
        for row, length in enumerate(lengths):
            self.lengths[row] = length
            self.drafter.admit(row)  # what it read in the failed step is not known

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what there is of the first `length` positions of one row to another."""
        self.cache.move(source, target, length)
        self.tokens[target, :length] = self.tokens[source, :length]
        if self.hidden is not None:
            self.hidden[target, :length] = self.hidden[source, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """The row in slot `source`, of at most `length` tokens, goes on in slot `target`."""
        self.copy(source, target, min(length, self.capacity))
        self.lengths[target] = self.lengths[source]
        self._sampling.move(source, target)
        self.drafter.move(source, target)

    def expect(self, sampling: Sequence[SamplingParams]) -> None:
        """The rows of now have these settings."""
        self.mode = SamplingMode.of(list(sampling))
        self.logprobs = {row: one.logprobs for row, one in enumerate(sampling) if one.logprobs is not None}

    def wanted_logprobs(self, rows: slice) -> dict[int, int]:
        """Which of `rows`, counted from their first, want how many log-probabilities."""
        return {row - rows.start: count for row, count in self.logprobs.items() if rows.start <= row < rows.stop}

    # ---- prompts

    def prefill(self, first: int, pieces: Sequence[slice]) -> None:
        """Read a piece of each of some rows, the first of them in slot `first`, in one forward.

        An empty piece comes alone, of a row of which there is nothing left to read.
        """
        if pieces[0].start == pieces[0].stop:
            return
        prompts = [self.tokens[first + place, piece] for place, piece in enumerate(pieces)]
        hidden = self.base.prefill(self.cache, first, prompts, [piece.start for piece in pieces])
        if self.hidden is not None:
            for place, part in enumerate(hidden.split([len(prompt) for prompt in prompts])):
                self.hidden[first + place, pieces[place]] = part

    def prefill_last(self, row: int, piece: slice) -> tuple[Tensor, Tensor]:
        """Read the last piece of a row and its pending token: that one's logits `[1, 1, V]`, and `[1, 1, d]`."""
        prompt = self.tokens[row, piece.start : piece.stop + 1]
        logits, hidden = self.base.prefill_last(self.cache, row, prompt, piece.start)
        if self.hidden is not None:
            self.hidden[row, piece] = hidden[:-1]
        return logits[None], hidden[None, -1:]

    # ---- a step

    def context(self, known: list[int], ahead: int = 0, least: float = 0.0) -> DraftContext:
        """What the drafter may look at, of as many rows as there are lengths `known`; see `DraftContext`."""
        rows = slice(0, len(known))
        return DraftContext(self.tokens[rows], self._hidden_of(rows), self.lengths[rows], known, ahead, least=least)

    def shape(self, count: int, nodes: int, longest: int) -> StepShape:
        """Of a step of `count` rows, none of which is longer than `longest`, with so many draft nodes each."""
        kv_length = padded_length(min(longest, self.max_length) + nodes + 1, self.capacity)
        biases = self._sampling.biases.shape[1] if self.mode.biased else 0
        return StepShape(padded_rows(count, self.slots), nodes, kv_length, self.mode, biases)

    def step(self, shape: StepShape) -> StepReport:
        """A step without the host: what it does follows from `shape` and from what is in the buffers."""
        rows = slice(0, shape.rows)
        bound = shape.kv_length - shape.nodes - 1
        context = DraftContext(self.tokens[rows], self._hidden_of(rows), self.lengths[rows], [], bound=bound)
        tree = self.drafter.propose(context, shape.nodes + 1) if shape.nodes else root_only(context.pending)
        verdict = self.verify(tree, shape.kv_length)
        self.commit(verdict, rows)
        self.lengths.clamp_(max=self.max_length)  # empty slots stay full
        return report(verdict, tree)

    def verify(self, tree: TokenTree, kv_length: int) -> Verdict:
        """Run the base over `tree` `[B, N]` of the first rows and walk down."""
        rows = slice(0, len(tree.tokens))
        ancestors = tree.ancestors(self._depth(tree))
        packing = Packing.of(tree.tokens >= 0) if self.packs and rows.stop > 1 and tree.size > 1 else None
        nodes = TreeNodes(tree.tokens.clamp_min(0), self.lengths[rows], tree.depths, ancestors, kv_length, packing)
        logits, hidden = self.base.verify(self.cache, nodes)
        return self.judge(tree, ancestors, logits, hidden, rows)

    def judge(self, tree: TokenTree, ancestors: Tensor, logits: Tensor, hidden: Tensor, rows: slice) -> Verdict:
        """Walk down the trees of `rows` by the base's choices."""
        lengths, history = self.lengths[rows], None
        if self.mode.penalties:
            history = History(self.tokens[rows], lengths, tree.tokens, tree.depths, ancestors)
        positions = lengths[:, None] + tree.depths + 1 if self.mode.random else None
        choices = choose(logits, self._sampling, self.mode, positions, history, rows)
        way = walk(tree, choices, ancestors, self._depth(tree))
        logprobs = None
        if wanted := self.wanted_logprobs(rows):
            logprobs = path_logprobs(logits, way, list(wanted), max(wanted.values()))
        return Verdict(way, hidden, logprobs)

    def commit(self, verdict: Verdict, rows: slice) -> None:
        """Move the path's KV, hidden states and tokens to each row's tail; the bonus token becomes pending."""
        way, hidden = verdict.walk, verdict.hidden
        width = way.path.shape[1]
        lengths = self.lengths[rows]
        if width > 1:
            self.cache.commit(lengths, way.path)
        places = lengths[:, None] + self._offsets[:width]
        self.tokens[rows].scatter_(1, places + 1, way.tokens)
        if self.hidden is not None:
            columns = (-1, -1, hidden.shape[-1])
            path_hidden = hidden.gather(1, way.path[:, :, None].expand(columns)) if width > 1 else hidden
            self.hidden[rows].scatter_(1, places[:, :, None].expand(columns), path_hidden.to(self.hidden))
        lengths += way.accepted + 1

    def _hidden_of(self, rows: slice) -> Tensor | None:
        return None if self.hidden is None else self.hidden[rows]

    def _depth(self, tree: TokenTree) -> int:
        return min(self.drafter.depth, tree.size - 1)


def report(verdict: Verdict, tree: TokenTree) -> StepReport:
    """What the host wants to know of a step, in as few tensors as can be."""
    way = verdict.walk
    if tree.size == 1:
        return StepReport(way.tokens, tree.log_probs[:, 1:], verdict.logprobs)
    real = (tree.tokens[:, 1:] >= 0).sum(dim=1, keepdim=True)
    outcome = torch.cat([way.accepted[:, None], real, way.path, way.tokens], dim=1)
    return StepReport(outcome, tree.log_probs[:, 1:], verdict.logprobs)
