"""What a row may choose from after a node, and what it chooses, from processed logits and keyed noise.

`NodeChoices` is the only place that decides either: verifiers, lenient ones too, and judges of soundness ask it.

The noise depends on (seed, position, token) alone. So a sequence's tokens are a function of model, prompt and seed: the
same with and without speculation, whatever the tree, the batch or the order. Logits are processed in the order of
transformers: logit bias, repetition penalty, frequency and presence penalty, what may not be chosen at all (limits,
and a guide's mask), temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drafter import devices
from drafter.acceptance.limits import MOST_TOKENS, Limits, LimitTable, OutputEnds
from drafter.acceptance.sampling import History, draw, keep_probable, keep_ranked, penalise, seed_key
from drafter.devices import send
from drafter.requests import ResolvedSampling, SamplingParams
from drafter.tree.token_tree import TokenTree

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass
class SamplingTable:
    """Sampling settings of all slots, `[S]` float64 or int64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    biased_tokens: Tensor  # `[S, K]` int64; K grows to the most that a request needs
    biases: Tensor  # `[S, K]` float64, 0 in unused entries
    keys: Tensor  # of the seeds
    prompt_lengths: Tensor
    limits: LimitTable

    @classmethod
    def empty(cls, slots: int, device: torch.device) -> SamplingTable:
        """Return a table of greedy rows."""
        none = ResolvedSampling()
        numbers = {
            name: torch.full((slots,), getattr(none, name), dtype=torch.float64, device=device) for name in _NUMBERS
        }
        integers = {
            name: torch.zeros(slots, dtype=torch.long, device=device) for name in ("top_k", "keys", "prompt_lengths")
        }
        unbiased = torch.zeros(slots, 0, dtype=torch.long, device=device)
        limits = LimitTable(slots, device)
        return cls(**numbers, **integers, biased_tokens=unbiased, biases=unbiased.double(), limits=limits)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes on which the kernels of a choice depend: most biased tokens of a row, and those of its limits."""
        return (self.biases.shape[1], *self.limits.sizes)

    def set(
        self, slot: int, given: SamplingParams, prompt_length: int, limits: Limits | None = None, vocabulary: int = 0
    ) -> None:
        """Set a slot to a request with a prompt of `prompt_length` tokens."""
        params = given.over()
        if not params.temperature:  # no filter, also beside rows that draw: what is said of its choices is its own
            params = replace(params, top_k=0, top_p=1.0, min_p=0.0)
        for name in _NUMBERS:
            getattr(self, name)[slot] = getattr(params, name)
        self.top_k[slot] = min(params.top_k, MOST_TOKENS)
        self._set_biases(slot, dict(params.logit_bias))
        self.prompt_lengths[slot] = prompt_length
        self.keys[slot] = seed_key(params.seed)
        self.limits.set(slot, limits, vocabulary)

    def _set_biases(self, slot: int, biases: dict[int, float]) -> None:
        if (missing := len(biases) - self.biases.shape[1]) > 0:
            self.biased_tokens, self.biases = F.pad(self.biased_tokens, (0, missing)), F.pad(self.biases, (0, missing))
        self.biased_tokens[slot], self.biases[slot] = 0, 0
        if biases:
            device = self.biases.device
            self.biased_tokens[slot, : len(biases)] = send(torch.tensor(list(biases)), device)
            self.biases[slot, : len(biases)] = send(torch.tensor(list(biases.values()), dtype=torch.float64), device)

    def move(self, source: int, target: int) -> None:
        for one in vars(self).values():
            if isinstance(one, Tensor):
                one[target] = one[source]
        self.limits.move(source, target)


@dataclass(frozen=True)
class SamplingMode:
    """Stages that a batch needs, known on the host; the others are skipped."""

    biased: bool
    penalties: bool
    limited: bool
    random: bool
    mixed: bool  # some rows are random and some are not
    ranked: bool  # top-k
    nucleus: bool  # top-p
    floored: bool  # min-p

    @property
    def likeliest(self) -> bool:
        """True if every choice is the token with the largest logit."""
        return not (self.biased or self.penalties or self.limited or self.random)

    @classmethod
    def of(cls, given: Sequence[SamplingParams]) -> SamplingMode:
        """Return the union of what the rows need."""
        params = [one.over() for one in given]
        drawn = [p for p in params if p.temperature > 0]
        return cls(
            biased=any(p.logit_bias for p in params),
            penalties=any(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty for p in params),
            limited=any(p.limited for p in params),
            random=bool(drawn),
            mixed=0 < len(drawn) < len(params),
            ranked=any(p.top_k > 0 for p in drawn),
            nucleus=any(p.top_p < 1 for p in drawn),
            floored=any(p.min_p > 0 for p in drawn),
        )


@dataclass(frozen=True)
class RowSampling:
    """Sampling of a step's R rows: `tokens` `[R, L]` (prompt and output) count up to `lengths` `[R]`, both int64."""

    table: SamplingTable
    rows: slice
    mode: SamplingMode
    tokens: Tensor
    lengths: Tensor


class NodeChoices:
    """The target model's choices at nodes of a step's trees.

    Args:
        logits: `[B, N, V]` by node id.
        allowed: `[B, N, ceil(V / 32)]` int32, the tokens that a guide, such as a grammar, lets follow each node, as
            bits: that of token v is bit v % 32 of word v // 32. None where no row has a guide.
    """

    def __init__(
        self,
        logits: Tensor,
        tree: TokenTree,
        ancestors: Tensor,
        sampling: RowSampling,
        allowed: Tensor | None = None,
    ) -> None:
        self._logits, self._depths, self._lengths, self._allowed = logits, tree.depths, sampling.lengths, allowed
        self._table, self._mode, self._slots = sampling.table, sampling.mode, sampling.rows.start or 0
        texts = sampling.tokens, sampling.lengths, sampling.table.prompt_lengths[sampling.rows], tree, ancestors
        self._history = History(*texts, logits.shape[-1]) if sampling.mode.penalties else None
        self._ends = OutputEnds(*texts) if sampling.mode.limited else None
        self.kernels = gpu_kernels(logits.device)

    @property
    def plain(self) -> bool:
        """True if every choice is the token with the largest logit, so that `everywhere` has them at once.

        A mask is applied everywhere at once only on the host, which sees where it changes nothing.
        """
        return self._mode.likeliest and (self._allowed is None or _reads_on_host(self._logits))

    def everywhere(self) -> tuple[Tensor, Tensor]:
        """Return the choices after all nodes `[B, N]`, and which rows are sound `[B]`; see `are_sound`. If `plain`."""
        choices = likeliest(self._logits)
        # NaN counts as the largest, so the chosen logits tell of all.
        sound = self._logits.gather(2, choices[:, :, None]).isfinite().all((1, 2))
        return choices if self._allowed is None else likeliest_allowed(self._logits, choices, self._allowed), sound

    def at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return the choice after node `nodes` `[R]` of each of `rows` `[R]`, `[R]` token ids."""
        if self.kernels is not None:
            return self._by_kernels(self.kernels, rows, nodes)
        if self._mode.likeliest:  # the logits as they are: no number changes, so that their own type tells
            return self._guided(rows, nodes, self._logits[rows, nodes]).argmax(-1)
        scores = self._scores(rows, nodes)
        if not self._mode.random:
            return scores.argmax(-1)
        return self._chosen(rows, nodes, scores, self._tempered(rows, scores))

    def _by_kernels(self, kernels: ModuleType, rows: Tensor, nodes: Tensor) -> Tensor:
        table, mode, slots, size = self._table, self._mode, self._slots + rows, self._logits.shape[2]
        biases = (table.biased_tokens[slots], table.biases[slots]) if mode.biased else None
        penalties, forbidden = None, None
        if self._history is not None:
            settings = (table.repetition_penalty[slots], table.frequency_penalty[slots], table.presence_penalty[slots])
            penalties = kernels.Penalties(self._history, *settings)
        if self._ends is not None:
            before = self._ends.before(rows, nodes, table.limits.words.shape[2] - 1)
            forbidden = (table.limits.next_forbidden(slots, *before, size), table.limits.allowed[slots])
        scores = kernels.scores(self._logits, rows, nodes, biases, penalties, forbidden, self._allowed)
        filters = (table.temperature[slots], table.top_k[slots], table.top_p[slots], table.min_p[slots])
        how = kernels.Draw(*filters, table.keys[slots], self._places(rows, nodes, slots))
        chosen: Tensor = kernels.choose(scores, how)
        return chosen

    def with_log_probs(self, rows: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the choices `[R]` after `nodes` `[R]` of `rows` `[R]`, and the log-probabilities `[R, V]` behind them.

        These are after all stages; rows of temperature 0 have those of temperature 1, without top-k, top-p and min-p.
        """
        scores = self._scores(rows, nodes)
        if not self._mode.random:
            return scores.argmax(-1), scores.log_softmax(-1)
        tempered = self._tempered(rows, scores)
        return self._chosen(rows, nodes, scores, tempered), tempered.log_softmax(-1)

    def log_probs(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return the log-probabilities `[R, V]` that `with_log_probs` does, without the choices."""
        scores = self._scores(rows, nodes)
        return (self._tempered(rows, scores) if self._mode.random else scores).log_softmax(-1)

    def own(self, rows: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens `[R]` and log-probabilities `[R, V]` after `nodes` `[R]`, before all stages.

        A guide still says which tokens there are.
        """
        scores = self._guided(rows, nodes, self._logits[rows, nodes].double())
        return scores.argmax(-1), scores.log_softmax(-1)

    def _scores(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return logits with biases and penalties, -inf where a token may not be chosen, `[R, V]` float64."""
        scores, table, slots = self._logits[rows, nodes].double(), self._table, self._slots + rows
        if self._mode.biased:
            scores = scores.scatter_add_(1, table.biased_tokens[slots], table.biases[slots])
        if self._history is not None:
            penalties = (table.repetition_penalty[slots], table.frequency_penalty[slots], table.presence_penalty[slots])
            scores = penalise(scores, *self._history.before(rows, nodes), *penalties)
        if self._ends is not None:
            before = self._ends.before(rows, nodes, table.limits.words.shape[2] - 1)
            scores = scores.masked_fill_(table.limits.forbidden(slots, *before, scores.shape[1]), -torch.inf)
        return self._guided(rows, nodes, scores)

    def _guided(self, rows: Tensor, nodes: Tensor, scores: Tensor) -> Tensor:
        if self._allowed is None:
            return scores
        return scores.masked_fill_(~bits(self._allowed[rows, nodes], scores.shape[1]), -torch.inf)

    def _tempered(self, rows: Tensor, scores: Tensor) -> Tensor:
        """Return scores `[R, V]` after temperature, top-k, top-p and min-p, shifted to a maximum of 0."""
        table, mode, slots = self._table, self._mode, self._slots + rows
        temperature = table.temperature[slots]
        # Shift the best score to 0 first, so that even the smallest temperature gives a finite quotient.
        scores = (scores - scores.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1)[:, None]
        if mode.ranked or mode.nucleus:
            top_k, top_p = (table.top_k[slots] if mode.ranked else None), (table.top_p[slots] if mode.nucleus else None)
            scores = keep_ranked(scores, top_k, top_p)
        if mode.floored:
            scores = keep_probable(scores, table.min_p[slots])
        return scores

    def _chosen(self, rows: Tensor, nodes: Tensor, scores: Tensor, tempered: Tensor) -> Tensor:
        """Return tokens `[R]` drawn by `tempered`; the argmax of `scores` in a row of temperature 0."""
        table, slots = self._table, self._slots + rows
        drawn = draw(tempered, table.keys[slots], self._places(rows, nodes, slots))
        return torch.where(table.temperature[slots] > 0, drawn, scores.argmax(-1)) if self._mode.mixed else drawn

    def _places(self, rows: Tensor, nodes: Tensor, slots: Tensor) -> Tensor:
        """Return the indices `[R]` that the chosen tokens have in their outputs."""
        return self._lengths[rows] + self._depths[rows, nodes] + 1 - self._table.prompt_lengths[slots]


@cache
def gpu_kernels(device: torch.device) -> ModuleType | None:
    """Return the module that chooses by kernels on this device; None where PyTorch does it."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return import_module("drafter.acceptance.triton_choice")


def bits(words: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of `words` `[R, W]` int32, `[R, count]` bool, the lowest of a word first."""
    places = torch.arange(32, dtype=words.dtype, device=words.device)
    return (words[..., None] >> places).bitwise_and_(1).flatten(1)[:, :count].bool()


def likeliest(logits: Tensor) -> Tensor:
    """Return the argmax of logits `[B, N, V]`, `[B, N]` int64; the lowest token on a tie."""
    if _reads_on_host(logits):
        # NumPy runs on this thread, in a fraction of the time that it takes to wake PyTorch's other threads.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def likeliest_allowed(logits: Tensor, choices: Tensor, allowed: Tensor) -> Tensor:
    """Return the argmax of logits `[B, N, V]` among the `allowed` tokens `[B, N, ceil(V / 32)]`, on the host.

    Most of the `choices` `[B, N]`, the argmax among all tokens, are allowed. Token 0 stands where nothing is.
    """
    words = allowed.gather(2, choices[..., None] // 32)[..., 0]
    found = choices.clone()
    for row, node in ((words >> choices % 32) & 1 == 0).nonzero().tolist():
        bytes_of_node = allowed[row, node].numpy().view(np.uint8)
        tokens = np.flatnonzero(np.unpackbits(bytes_of_node, count=logits.shape[-1], bitorder="little").view(np.bool_))
        found[row, node] = int(tokens[logits[row, node].numpy()[tokens].argmax()]) if len(tokens) else 0
    return found


def are_sound(logits: Tensor) -> Tensor:
    """Return whether a row's logits `[B, N, V]` have neither NaN nor +inf, `[B]`."""
    if _reads_on_host(logits):
        # The maximum is NaN if any value is.
        return torch.from_numpy(logits.numpy().max((1, 2))).isfinite()
    return logits.amax((1, 2)).isfinite()


def _reads_on_host(logits: Tensor) -> bool:
    return not devices.is_asynchronous(logits.device) and logits.dtype in (torch.float32, torch.float64)
