"""Device buffers of sequences, by slot: texts, KV cache, hidden states and sampling settings.

Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from drafter import devices
from drafter.acceptance.choices import RowSampling, SamplingMode, SamplingTable
from drafter.acceptance.contract import Accepted, PathLogprobs, Verified, token_logprobs
from drafter.acceptance.limits import Limits
from drafter.drafters.contract import DraftContext, Drafter, Ids, Loan
from drafter.drafters.slots import NO_TEXT
from drafter.engine.memory import slot_length
from drafter.requests import Request, SamplingParams
from drafter.statistics import StageTimes
from drafter.target_model.model import BaseModel
from drafter.target_model.sight import Features
from drafter.tree.token_tree import root_only


class BatchState:
    """Buffers for S `slots` of sequences, allocated once. The drafter is opened here, and its slot states follow.

    Args:
        max_length: Prompt and output tokens of a sequence.
        times: Lent to the drafter.
        kv_bytes: Largest size of the KV cache; see `BaseModel.new_cache`.
        kept: Number of further slots, for texts that no step decodes.
        brought: Draft tokens of the largest tree that is drafted elsewhere.

    Attributes:
        kept_slots: Those of `kept`, behind the others.
        spec: The drafter's, of trees from elsewhere, too.
        tokens: `[S + kept, L]` int64 prompt, output and the pending token of each slot.
        hidden: `[S + kept, L, K · d]` the hidden states that the drafter reads; None if it reads none.
        shift: `[S]` int64 what each slot's images add to the positions of later tokens; None if the model reads none.
        lengths: `[S]` int64 committed tokens. An empty slot counts as full, so that a step that runs over it writes
            behind every text.
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
        kept: int = 0,
        brought: int = 0,
    ) -> None:
        self.base, self.drafter, self.slots, self.max_length = base, drafter, slots, max_length
        self.kept_slots, in_all = range(slots, slots + kept), slots + kept
        self.spec = spec = drafter.spec.beside(brought)
        device = base.device
        self._step_positions = spec.positions
        self.capacity = slot_length(max_length, self._step_positions - 1, spec.max_depth)
        self.cache = base.new_cache(in_all, self.capacity, kv_bytes)
        self.tokens = torch.zeros(in_all, self.capacity, dtype=torch.long, device=device)
        self.hidden: Tensor | None = None
        if width := len(spec.hidden_layers) * base.hidden_size:
            self.hidden = torch.zeros(in_all, self.capacity, width, dtype=base.dtype, device=device)
        self.lengths = torch.full((slots,), max_length, dtype=torch.long, device=device)
        self.shift: Tensor | None = None
        if base.sight is not None:
            self.shift = torch.zeros(slots, dtype=torch.long, device=device)
        self._offsets = torch.arange(spec.max_depth + 1, device=device)
        self.sampling = SamplingTable.empty(slots, device)
        drafter.open(Loan(base, in_all, self.capacity, times, self.cache))
        self._expected: Iterable[SamplingParams] | None = None
        self._mode = SamplingMode.of([])

    # ---- what is in the slots

    def has_room(self, length: int, rows: int) -> bool:
        """Return whether there is memory for a text of `length` tokens beside `rows` growing sequences."""
        return self.cache.blocks.has_room(length + self._step_positions, rows)

    def reserve(self, slot: int, length: int) -> bool:
        """Reserve memory for a step that begins with at most `length` tokens; False if too little is left."""
        return self.cache.blocks.reserve(slot, length + self._step_positions)

    def enter(self, slot: int, text: Ids, request: Request, limits: Limits | None = None) -> None:
        """Put a request's text, of which nothing has been read, into an empty slot."""
        self.tokens[slot, : len(text)] = devices.send(torch.from_numpy(text), self.base.device)
        self.sampling.set(slot, request.sampling, len(request.prompt_ids), limits, self.base.vocab_size)
        if self.shift is not None:
            self.shift[slot] = 0
        self.cache.enter(slot, request.salt)
        self.reset_drafter(slot, text, request)

    def set_shift(self, slot: int, features: Features) -> None:
        """Set the positions of a slot's later tokens by the features of its prompt."""
        assert self.shift is not None
        self.shift[slot] = features.shift

    def reset_drafter(self, slot: int, text: Ids, request: Request | None = None) -> None:
        """Replace what the drafter keeps for the slot by that of a text of which it has read nothing."""
        for state in self.drafter.slots:
            state.enter(slot, text, request)

    def begin(self, slot: int, length: int) -> None:
        """Begin to decode a slot of which `length` tokens have been read; the next one is pending."""
        self.lengths[slot] = length

    def end(self, slot: int) -> None:
        """Count the slot as empty, and free its memory."""
        self.lengths[slot] = self.max_length
        self.cache.blocks.release(slot)

    def restore(self, texts: Sequence[Ids], requests: Sequence[Request]) -> None:
        """Put the first slots back to these texts `[L + 1]`, and empty the others, after a step that failed."""
        # A step writes behind a sequence's committed tokens and moves its length last, so the length undoes any part
        # of it. What the drafter has read is not known: it reads again.
        self.lengths.fill_(self.max_length)
        for slot, (text, request) in enumerate(zip(texts, requests, strict=True)):
            self.lengths[slot] = len(text) - 1
            self.reset_drafter(slot, text, request)
        for slot in range(len(texts), self.slots):
            self.cache.blocks.release(slot)

    def forget(self) -> None:
        """Empty all slots, and zero them: attention reads masked positions, too, which may not be finite."""
        self.restore([], [])
        self.cache.zero()
        if self.hidden is not None:
            devices.zero_untouched(self.hidden)
        for slot in range(self.slots):
            self.reset_drafter(slot, NO_TEXT)

    def copy(self, source: int, target: int, length: int) -> int:
        """Copy the first `length` positions of one slot to another, whose text begins with the same tokens.

        Return how many the two share now: all, or fewer where the target model's cache cannot share them.
        """
        if length := self.cache.copy(source, target, length):
            self._copy_texts(source, target, length)
            for state in self.drafter.slots:
                state.copy(source, target, length)
        return length

    def keep(self, source: int, target: int, length: int) -> None:
        """Move the first `length` positions of a slot whose sequence leaves to one of `kept_slots`."""
        self._copy_texts(source, target, length)
        for state in self.drafter.slots:
            state.copy(source, target, length)
        self.cache.move(source, target, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Move the sequence in slot `source`, of at most `length` tokens, to slot `target`."""
        length = min(length, self.capacity)
        self._copy_texts(source, target, length)
        self.lengths[target] = self.lengths[source]
        if self.shift is not None:
            self.shift[target] = self.shift[source]
        self.sampling.move(source, target)
        for state in self.drafter.slots:
            state.move(source, target)
        self.cache.move(source, target, length)  # last, as it may take the source's away, and others may fail

    def clear(self, slot: int) -> None:
        """Zero a slot whose sequence leaves.

        A masked position takes part in attention with weight zero, and zero times NaN is NaN.
        """
        self.cache.clear(slot)
        if self.hidden is not None:
            self.hidden[slot] = 0
        self.reset_drafter(slot, NO_TEXT)

    def expect(self, sampling: Iterable[SamplingParams]) -> None:
        """Set the sampling settings of the decoded slots, which are the first ones."""
        # Read when a step asks for what follows from them: hundreds of sequences may leave in between.
        self._expected = sampling

    @property
    def mode(self) -> SamplingMode:
        """Sampling operations that the current sequences need."""
        if self._expected is not None:
            self._mode, self._expected = SamplingMode.of(list(self._expected)), None
        return self._mode

    @mode.setter
    def mode(self, mode: SamplingMode) -> None:
        self._mode, self._expected = mode, None

    # ---- what the stages of a step read and write

    def context(self, known: list[int], ahead: int = 0) -> DraftContext:
        """Return the drafter's view of the first slots, one for each length in `known`; see `DraftContext`."""
        rows = slice(0, len(known))
        texts = self.tokens[rows], self._hidden_of(rows), self.lengths[rows]
        return DraftContext(*texts, known, ahead, shift=self.shift_of(rows))

    def bounded_context(self, rows: int, bound: int) -> DraftContext:
        """Return the same for a step whose shapes repeat: no sequence has more than `bound` committed tokens."""
        some = slice(0, rows)
        texts = self.tokens[some], self._hidden_of(some), self.lengths[some]
        return DraftContext(*texts, [], bound=bound, shift=self.shift_of(some))

    def shift_of(self, rows: slice) -> Tensor | None:
        """Return `[B]` what images add to the positions of these slots' later tokens; None if the model reads none."""
        return None if self.shift is None else self.shift[rows]

    def row_sampling(self, rows: slice) -> RowSampling:
        """Return the sampling settings and texts of these slots, for a verifier."""
        return RowSampling(self.sampling, rows, self.mode, self.tokens[rows], self.lengths[rows])

    def read(self, first: int, spans: Sequence[slice], features: Features | None = None) -> None:
        """Prefill a piece of each prompt in slots `first` and following. An empty piece comes alone.

        Args:
            features: Of the prompt of the only piece, if it has images.
        """
        if spans[0].start == spans[0].stop:
            return
        pieces, seen = self._pieces(first, spans, features)
        starts = [span.start for span in spans]
        hidden = self.base.prefill(self.cache, first, pieces, starts, self.drafter.spec.hidden_layers, **seen)
        for row, part in enumerate(hidden.split([len(piece) for piece in pieces])):
            self._store_hidden(first + row, spans[row], part)

    def read_alone(
        self, slot: int, span: slice, features: Features | None, *, scored: int | None = None, ends: bool = False
    ) -> tuple[PathLogprobs | None, Verified | None]:
        """Prefill a piece of a prompt, and return what is wanted of its logits.

        Args:
            scored: Return the log-probability of the token after each, with so many of the best; None for none.
            ends: Read the prompt's pending token, which comes next, too, and return it as a tree of one node.
        """
        (piece,), seen = self._pieces(slot, [slice(span.start, span.stop + ends)], features)
        layers, keep = self.drafter.spec.hidden_layers, 1 if scored is None else len(piece)
        logits, hidden = self.base.prefill_last(self.cache, slot, piece, span.start, layers, keep, **seen)
        self._store_hidden(slot, span, hidden)
        logprobs = verified = None
        if scored is not None:
            following = self.tokens[slot, span.start + 1 : span.stop + 1]
            logprobs = token_logprobs(logits[None, : len(following)], following[None], scored)
        if ends:
            tree = root_only(piece[-1:])
            verified = Verified(tree, tree.ancestors(0), 0, logits[None, -1:], hidden[None, -1:])
        return logprobs, verified

    def _pieces(
        self, first: int, spans: Sequence[slice], features: Features | None
    ) -> tuple[list[Tensor], dict[str, Any]]:
        """Return the tokens of each piece, and what goes with them; with features, up to the last that they see."""
        if features is None:
            shift = self.shift_of(slice(first, first + len(spans)))
            return [self.tokens[first + row, span] for row, span in enumerate(spans)], {"shift": shift}
        start, stop = spans[0].start, spans[0].stop
        if features.borders is not None:
            stop = features.borders.behind(stop)
        return [self.tokens[first, start:stop]], {"features": features.part(start, stop)}

    def _store_hidden(self, slot: int, span: slice, hidden: Tensor) -> None:
        if self.hidden is not None:
            self.hidden[slot, span] = hidden[: span.stop - span.start]

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of a token."""
        return 0 if self.hidden is None else self.hidden.shape[2] * self.hidden.element_size()

    def fetch_hidden(self, slot: int, length: int) -> tuple[Tensor | None, torch.cuda.Event | None]:
        """Send the hidden states `[length, K · d]` of a slot's text to the host; see `devices.fetch`."""
        return (None, None) if self.hidden is None else devices.fetch(self.hidden[slot, :length])

    def commit(self, accepted: Accepted, hidden: Tensor, sound: Tensor, rows: slice) -> None:
        """Move KV, hidden states and tokens of the accepted paths to each row's tail; the last token becomes pending.

        A row that is not sound stays as it was before the step, and what the step has written is zeroed; see `clear`.

        Args:
            hidden: `[R, N, K · d]` of the nodes.
            sound: `[R]` bool: whether all of a row's logits are finite; if they are, so are its KV and hidden states.
            rows: R slots.
        """
        path, lengths = accepted.path, self.lengths[rows]
        # Reading the device's numbers costs nothing on a CPU, and would wait for a GPU.
        all_sound = not devices.is_asynchronous(self.base.device) and bool(sound.all())
        width = path.shape[1]
        self.cache.commit(lengths, path, rows)
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
        lengths.clamp_(max=self.max_length)  # empty slots stay full

    def _copy_texts(self, source: int, target: int, length: int) -> None:
        self.tokens[target, :length] = self.tokens[source, :length]
        if self.hidden is not None:
            self.hidden[target, :length] = self.hidden[source, :length]

    def _hidden_of(self, rows: slice) -> Tensor | None:
        return None if self.hidden is None else self.hidden[rows]
