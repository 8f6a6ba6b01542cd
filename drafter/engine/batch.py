"""The device's state of the active sequences: texts, KV cache, hidden states and sampling settings, by slot.

Nothing here knows of requests, and nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from drafter import devices
from drafter.acceptance.choices import RowSampling, SamplingMode, SamplingTable
from drafter.acceptance.contract import Accepted
from drafter.budget.contract import Choosing, StepLoad
from drafter.drafters.contract import DraftContext, Drafter, Ids, Loan
from drafter.engine.memory import slot_length
from drafter.requests import SamplingParams
from drafter.statistics import StageTimes
from drafter.target.model import BaseModel


class BatchState:
    """Buffers for `slots` sequences, allocated once. The drafter's memory of a slot follows what happens to the slot.

    Args:
        base: The base model.
        drafter: Is opened here, and told of every change.
        slots: Sequences at most.
        max_length: Prompt and output tokens of a sequence.
        times: Lent to the drafter.
        kv_bytes: Most that the KV cache may take; see `BaseModel.new_cache`.

    Attributes:
        tokens: `[S, L]` int64 prompt, output and the pending token of each slot.
        hidden: `[S, L, K · d]` the hidden states that the drafter reads; None if it reads none.
        lengths: `[S]` int64 committed tokens. An empty slot counts as full, so that a step that runs over it writes
            behind every text.
        cache: The base's keys and values.
        capacity: L. Behind `max_length` tokens there is room for draft nodes and the stale ends of a path.

    Raises:
        LoadError: The device has no room for the cache.
    """

    def __init__(
        self,
        base: BaseModel,
        drafter: Drafter,
        slots: int,
        max_length: int,
        times: StageTimes,
        kv_bytes: int | None = None,
    ) -> None:
        self.base, self.drafter, self.slots, self.max_length = base, drafter, slots, max_length
        spec, device = drafter.spec, base.device
        self._step_positions = max(spec.max_nodes + 1, spec.scratch)
        self.capacity = slot_length(max_length, self._step_positions - 1, spec.max_depth)
        self.cache = base.new_cache(slots, self.capacity, kv_bytes)
        self.tokens = torch.zeros(slots, self.capacity, dtype=torch.long, device=device)
        self.hidden: Tensor | None = None
        if width := len(spec.hidden_layers) * base.hidden_size:
            self.hidden = torch.zeros(slots, self.capacity, width, dtype=base.dtype, device=device)
        self.lengths = torch.full((slots,), max_length, dtype=torch.long, device=device)
        self._offsets = torch.arange(spec.max_depth + 1, device=device)
        self.sampling = SamplingTable.empty(slots, device)
        drafter.open(Loan(base, slots, self.capacity, self.cache if spec.shared_layers else None, times))
        self._expected: Iterable[SamplingParams] | None = None
        self._mode, self._logprobs = SamplingMode.of([]), dict[int, int]()

    # ---- what is in the slots

    def has_room(self, length: int, rows: int) -> bool:
        """Return whether there is memory for a text of `length` tokens beside `rows` growing sequences."""
        return self.cache.has_room(length + self._step_positions, rows)

    def reserve(self, slot: int, length: int) -> bool:
        """Have memory for a step that begins with at most `length` tokens; False if too little is left."""
        return self.cache.reserve(slot, length + self._step_positions)

    def enter(self, slot: int, text: Ids, sampling: SamplingParams, prompt_length: int) -> None:
        """Put a text, of which nothing has been read, into an empty slot."""
        self.tokens[slot, : len(text)] = devices.send(torch.from_numpy(text), self.base.device)
        self.sampling.set(slot, sampling, prompt_length)
        self.drafter.enter(slot, text)

    def begin(self, slot: int, length: int) -> None:
        """Let the slot be decoded from now on: `length` tokens have been read, and the next one is pending."""
        self.lengths[slot] = length

    def end(self, slot: int) -> None:
        """Count the slot as empty, and give its memory back."""
        self.lengths[slot] = self.max_length
        self.cache.release(slot)

    def restore(self, texts: Sequence[Ids]) -> None:
        """Put the first slots back to these texts `[L + 1]`, and empty the others, after a step that failed.

        A step writes behind a sequence's committed tokens and moves its length last. So whatever part of the step was
        done, a sequence is as it was once its length is. What the drafter has read is not known: it reads again.
        """
        self.lengths.fill_(self.max_length)
        for slot, text in enumerate(texts):
            self.lengths[slot] = len(text) - 1
            self.drafter.enter(slot, text)
        for slot in range(len(texts), self.slots):
            self.cache.release(slot)

    def forget(self) -> None:
        """Empty all slots, and leave nothing that is not finite: attention reads masked positions, too."""
        self.restore([])
        # Numbers that are finite are left: to write all of a large memory takes long, and makes the system provide it.
        if not all(bool(buffer.sum().isfinite()) for buffer in self.cache.buffers):
            for buffer in self.cache.buffers:
                buffer.zero_()
            for slot in range(self.slots):
                self.clear(slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another, whose text begins with the same tokens."""
        self.cache.copy(source, target, length)
        self._copy_texts(source, target, length)
        self.drafter.copy(source, target, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Let the sequence in slot `source`, of at most `length` tokens, go on in slot `target`."""
        length = min(length, self.capacity)
        self._copy_texts(source, target, length)
        self.lengths[target] = self.lengths[source]
        self.sampling.move(source, target)
        self.drafter.move(source, target)
        self.cache.move(source, target, length)  # last, as it may take the source's away, and others may fail

    def clear(self, slot: int) -> None:
        """Set all that the slot holds to zero.

        A masked position still takes part in attention, with weight zero, and zero times NaN is NaN: a number that is
        not finite would reach the next sequence in this slot.
        """
        self.cache.clear(slot)
        if self.hidden is not None:
            self.hidden[slot] = 0
        self.drafter.clear(slot)

    def expect(self, sampling: Iterable[SamplingParams]) -> None:
        """Let the first slots, which are all that are decoded, have these settings.

        They are looked at when a step asks for what follows from them: hundreds of sequences may leave in between.
        """
        self._expected = sampling

    @property
    def mode(self) -> SamplingMode:
        """Sampling operations that the current sequences need."""
        self._look_at_expected()
        return self._mode

    @mode.setter
    def mode(self, mode: SamplingMode) -> None:
        self._look_at_expected()
        self._mode = mode

    @property
    def logprobs(self) -> dict[int, int]:
        """Slots that want log-probabilities → of how many of the most probable tokens."""
        self._look_at_expected()
        return self._logprobs

    def _look_at_expected(self) -> None:
        if self._expected is not None:
            some, self._expected = list(self._expected), None
            self._mode = SamplingMode.of(some)
            self._logprobs = {slot: one.logprobs for slot, one in enumerate(some) if one.logprobs is not None}

    # ---- what the stages of a step read and write

    def context(self, known: list[int], ahead: int = 0) -> DraftContext:
        """Return the drafter's view of the first slots, one for each length in `known`; see `DraftContext`."""
        rows = slice(0, len(known))
        return DraftContext(self.tokens[rows], self._hidden_of(rows), self.lengths[rows], known, ahead)

    def load(self, known: list[int]) -> StepLoad:
        """Return the load of a step over the first slots, one for each length in `known`."""
        mode = self.mode
        choosing: Choosing = "drawn"
        if mode.likeliest:
            choosing = "greedy"
        elif mode.ranked or mode.nucleus:
            choosing = "filtered"
        return StepLoad(len(known), sum(known) / len(known), choosing)

    def bounded_context(self, rows: int, bound: int) -> DraftContext:
        """The same for a step whose shapes repeat: no sequence has more than `bound` committed tokens."""
        some = slice(0, rows)
        return DraftContext(self.tokens[some], self._hidden_of(some), self.lengths[some], [], bound=bound)

    def row_sampling(self, rows: slice) -> RowSampling:
        """Return the sampling settings and texts of these slots, for a verifier."""
        return RowSampling(self.sampling, rows, self.mode, self.tokens[rows], self.lengths[rows])

    def store_hidden(self, slot: int, piece: slice, hidden: Tensor) -> None:
        """Keep hidden states `[P, K · d]` of a piece of a prompt, if the drafter reads any."""
        if self.hidden is not None:
            self.hidden[slot, piece] = hidden

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of a token."""
        return 0 if self.hidden is None else self.hidden.shape[2] * self.hidden.element_size()

    def fetch_hidden(self, slot: int, length: int) -> tuple[Tensor | None, torch.cuda.Event | None]:
        """Send the hidden states `[length, K · d]` of a slot's text to the host; see `devices.fetch`."""
        return (None, None) if self.hidden is None else devices.fetch(self.hidden[slot, :length])

    def commit(self, accepted: Accepted, hidden: Tensor, sound: Tensor, rows: slice) -> None:
        """Move KV, hidden states and tokens of the accepted paths to each row's tail; the last token becomes pending.

        A row that is not sound stays as it was before the step, and nothing of what the step has written is left:
        attention reads masked positions, too, with weight zero, and zero times NaN is NaN.

        Args:
            accepted: The paths of the R rows.
            hidden: `[R, N, K · d]` of the nodes.
            sound: `[R]` bool: whether all of a row's logits are finite; if they are, so are its KV and hidden states.
            rows: R slots.
        """
        path, lengths = accepted.path, self.lengths[rows]
        # To look at the device's numbers costs nothing on a CPU and would be to wait for a GPU.
        all_sound = not devices.is_asynchronous(self.base.device) and bool(sound.all())
        width = path.shape[1]
        if width > 1:
            self.cache.commit(lengths, path)
        if not all_sound:
            self.cache.scrub(lengths, hidden.shape[1], ~sound, rows)
        places = lengths[:, None] + self._offsets[:width]
        self.tokens[rows].scatter_(1, places + 1, accepted.tokens)
        if self.hidden is not None:
            columns = (-1, -1, hidden.shape[-1])
            path_hidden = hidden.gather(1, path[:, :, None].expand(columns)) if width > 1 else hidden
            if not all_sound:
                path_hidden = torch.where(sound[:, None, None], path_hidden, 0)
            self.hidden[rows].scatter_(1, places[:, :, None].expand(columns), path_hidden.to(self.hidden))
        lengths += accepted.count + 1 if all_sound else (accepted.count + 1) * sound

    def _copy_texts(self, source: int, target: int, length: int) -> None:
        self.tokens[target, :length] = self.tokens[source, :length]
        if self.hidden is not None:
            self.hidden[target, :length] = self.hidden[source, :length]

    def _hidden_of(self, rows: slice) -> Tensor | None:
        return None if self.hidden is None else self.hidden[rows]
