"""What a row may not choose: tokens that its settings forbid after the output so far.

`Limits` is the rule, on the host; `LimitTable` has it for all slots on the device, where choices are made. Names and
meanings are vLLM's, but a bad word after a space is one whatever number of tokens it has there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.devices import send
from drafter.errors import RequestError, shown
from drafter.requests import SamplingParams
from drafter.salted import salted_cache
from drafter.text.tokenizers import refuse_panics
from drafter.tree.token_tree import TokenTree

_LONGEST_BAD_WORD = 32  # tokens
MOST_TOKENS = 1 << 31  # upper bound of any vocabulary or output; larger settings are clamped to it
_NONE = -1  # fills unused entries


@dataclass(frozen=True)
class Limits:
    """The tokens that one request may choose from at each place of its output.

    Args:
        allowed: Nothing else; empty for all tokens.
        early: Not among the first `min_tokens` tokens.
        bad_words: Sequences that the output may not contain: after all but the last token of one, that is forbidden.
    """

    allowed: frozenset[int] = frozenset()
    early: frozenset[int] = frozenset()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, sampling: SamplingParams, eos: Collection[int], tokenizer: Any) -> Limits | None:
        """Return the limits of a request's settings; None where it may choose any token.

        Raises `RequestError` if a bad word has no tokens, or too many, or no first token is left.
        """
        if not sampling.limited:
            return None
        early = frozenset(eos) | set(sampling.stop_token_ids) if sampling.min_tokens else frozenset()
        words = bad_word_tokens(tokenizer, sampling.bad_words) if sampling.bad_words else ()
        limits = cls(frozenset(sampling.allowed_token_ids), early, sampling.min_tokens, words)
        if limits.allowed and not any(limits.permits([token]) for token in limits.allowed):
            raise RequestError("min_tokens and bad_words forbid all of allowed_token_ids: no token is left")
        return limits

    def permits(self, output: Sequence[int]) -> bool:
        """Return whether the last token of `output` may follow the others."""
        token = output[-1]
        if (self.allowed and token not in self.allowed) or (token in self.early and len(output) <= self.min_tokens):
            return False
        return not any(tuple(output[-len(word) :]) == word for word in self._words_by_end.get(token, ()))

    @cached_property
    def _words_by_end(self) -> dict[int, list[tuple[int, ...]]]:
        found = defaultdict(list)
        for word in self.bad_words:
            found[word[-1]].append(word)
        return found


@salted_cache(64)  # the requests of a job have the same
def bad_word_tokens(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, and those that it has after a space, unless they only end with the former."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        with refuse_panics():
            plain, spaced = (
                tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
            )
        if not 1 <= len(plain) <= _LONGEST_BAD_WORD:
            raise RequestError(
                f"bad_words may have words of 1 to {_LONGEST_BAD_WORD} tokens, and {shown(word)} has {len(plain)}"
            )
        found[plain] = None
        if spaced[-len(plain) :] != plain:
            found[spaced] = None
    return tuple(found)


class LimitTable:
    """The limits of all slots. Its tensors grow to the most that a request has needed, and wait for the first such one.

    Attributes:
        allowed: `[S, V]` bool.
        early: `[S, K]` int64.
        min_tokens: `[S]` int64.
        words: `[S, W, M]` int64, each aligned to its end.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.allowed = torch.ones(slots, 0, dtype=torch.bool, device=device)
        self.min_tokens = torch.zeros(slots, dtype=torch.long, device=device)
        self.early = torch.zeros(slots, 0, dtype=torch.long, device=device)
        self.words = torch.zeros(slots, 0, 1, dtype=torch.long, device=device)
        self._used = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes on which the kernels of `forbidden` depend."""
        return (self.allowed.shape[1], self.early.shape[1], *self.words.shape[1:])

    def set(self, slot: int, limits: Limits | None, vocabulary: int) -> None:
        """Set a slot; None if it has no limits. Tokens outside the `vocabulary` cannot come anyway."""
        if limits is None and not self._used:
            return
        self._used = True
        own, device = limits or Limits(), self.min_tokens.device
        early = [token for token in own.early if token < vocabulary]
        words = [list(word) for word in own.bad_words if max(word) < vocabulary]
        if own.allowed and not self.allowed.shape[1]:
            self.allowed = torch.ones(len(self.allowed), vocabulary, dtype=torch.bool, device=device)
        self.allowed[slot] = not own.allowed
        if own.allowed:
            self.allowed[slot, _sent(own.allowed, device)] = True
        self.min_tokens[slot] = min(own.min_tokens, MOST_TOKENS)  # a larger one would end the engine
        self.early = _grown(self.early, len(early))
        self.early[slot] = _NONE
        if early:
            self.early[slot, : len(early)] = _sent(early, device)
        longest = max(map(len, words), default=1)
        self.words = _grown(self.words, len(words), longest)
        self.words[slot] = _NONE
        if words:
            padded = [[_NONE] * (longest - len(word)) + word for word in words]
            self.words[slot, : len(padded), -longest:] = send(torch.tensor(padded), device)

    def move(self, source: int, target: int) -> None:
        if self._used:
            for tensor in (self.allowed, self.min_tokens, self.early, self.words):
                tensor[target] = tensor[source]

    def forbidden(self, slots: Tensor, said: Tensor, ends: Tensor, vocabulary: int) -> Tensor:
        """Return which tokens may not come next in `slots` `[R]`, `[R, V]` bool.

        Args:
            said: `[R]` number of tokens of the output so far.
            ends: `[R, M - 1]` its last ones, -1 where there are fewer.
        """
        # Unused entries go to one more column.
        found = torch.zeros(len(slots), vocabulary + 1, dtype=torch.bool, device=slots.device)
        found = found.scatter_(1, self.next_forbidden(slots, said, ends, vocabulary), True)[:, :vocabulary]
        return found | ~self.allowed[slots] if self.allowed.shape[1] else found

    def next_forbidden(self, slots: Tensor, said: Tensor, ends: Tensor, vocabulary: int) -> Tensor:
        """Return the tokens that `early` and `words` forbid next, `[R, K + W]`, `vocabulary` in unused entries.

        See `forbidden`.
        """
        early = torch.where((said < self.min_tokens[slots])[:, None], self.early[slots], _NONE)
        words = self.words[slots]
        begun = ((words[..., :-1] == ends[:, None]) | (words[..., :-1] < 0)).all(-1)
        found = torch.cat([early, torch.where(begun, words[..., -1], _NONE)], 1)
        return torch.where(found < 0, vocabulary, found)


class OutputEnds:
    """The output before each choice: texts `tokens` `[B, L]` up to `lengths` `[B]`, and the path down the tree.

    It begins at `prompt_lengths` `[B]`.
    """

    def __init__(
        self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor, tree: TokenTree, ancestors: Tensor
    ) -> None:
        self._tokens, self._lengths, self._prompts = tokens, lengths, prompt_lengths
        self._tree, self._ancestors = tree, ancestors

    def before(self, rows: Tensor, nodes: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the output's length before the choice at `nodes` `[R]` of `rows` `[R]`, `[R]`, and its last `count`
        tokens `[R, count]`, -1 where there are fewer.
        """
        tree, lengths, prompts = self._tree, self._lengths[rows][:, None], self._prompts[rows][:, None]
        here = lengths + tree.depths[rows, nodes][:, None]
        said = here[:, 0] + 1 - prompts[:, 0]
        if not count:
            return said, here[:, :0]
        depths = torch.where(self._ancestors[rows, nodes], tree.depths[rows], tree.size)
        path = depths.new_zeros(len(rows), tree.size + 1).scatter_(1, depths, tree.tokens[rows])
        places = here - torch.arange(count - 1, -1, -1, device=rows.device)
        committed = self._tokens[rows[:, None], places.clamp(0, self._tokens.shape[1] - 1)]
        drafted = path.gather(1, (places - lengths).clamp(0, tree.size))
        ends = torch.where(places < lengths, committed, drafted)
        return said, torch.where(places >= prompts, ends, _NONE)


def _sent(tokens: Iterable[int], device: torch.device) -> Tensor:
    return send(torch.tensor(sorted(tokens)), device)


def _grown(tensor: Tensor, *sizes: int) -> Tensor:
    """Pad all dimensions but the first to at least `sizes`: the second behind, a third in front."""
    missing = [max(size - have, 0) for size, have in zip(sizes, tensor.shape[1:], strict=True)]
    if not any(missing):
        return tensor
    behind, in_front = missing[0], missing[1:]
    return F.pad(tensor, (*(side for front in in_front for side in (front, 0)), 0, behind), value=_NONE)
