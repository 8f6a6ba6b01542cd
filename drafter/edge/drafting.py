"""Drafts on a device: trees behind a text, grown by any drafter that needs no target model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from drafter.drafters.contract import Ask, Committed, DraftContext, Drafter, Loan
from drafter.drafters.slots import SlotTensors
from drafter.edge.messages import Draft
from drafter.errors import LoadError
from drafter.requests import Request
from drafter.statistics import StageTimes
from drafter.tree.paths import left_behind


@dataclass
class DraftTree:
    """Draft tokens behind a text.

    Each has the index of its parent, which comes before it (-1 for the text's end), and the log-probability of its
    path, which is no higher than its parent's.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def best_path(self) -> list[int]:
        """Return the nodes from the root to a leaf, at each level the most probable one."""
        path, here = list[int](), -1
        while children := [node for node in range(here + 1, len(self)) if self.parents[node] == here]:
            here = max(children, key=self.log_probs.__getitem__)
            path.append(here)
        return path

    def graft(self, under: int, tree: DraftTree) -> None:
        """Add a tree under a leaf, or under the root if that is -1 and has no children."""
        base, above = len(self), self.log_probs[under] if under >= 0 else 0.0
        self.tokens += tree.tokens
        self.parents += [under if parent < 0 else base + parent for parent in tree.parents]
        self.log_probs += [above + one for one in tree.log_probs]

    def after(self, text: Sequence[int]) -> DraftTree:
        """Return what is left of the tree behind tokens that have come: nothing if they are not in it."""
        left = left_behind(self.tokens, self.parents, text)
        if not left:
            return DraftTree()
        root = self.parents[left[0][0]]
        above = self.log_probs[root] if root >= 0 else 0.0
        return DraftTree(
            [self.tokens[node] for node, _, _ in left],
            [parent for _, parent, _ in left],
            [self.log_probs[node] - above for node, _, _ in left],
        )

    def best(self, nodes: int) -> DraftTree:
        chosen = sorted(sorted(range(len(self)), key=lambda node: -self.log_probs[node])[:nodes])
        places = {node: place for place, node in enumerate(chosen)}
        return DraftTree(
            [self.tokens[node] for node in chosen],
            [places.get(self.parents[node], -1) for node in chosen],
            [self.log_probs[node] for node in chosen],
        )

    def draft(self, seq: int, at: int, nodes: int) -> Draft:
        best = self.best(nodes)
        draft = Draft(seq, at, tuple(best.tokens), tuple(best.parents))
        return Draft(seq, at, draft.tokens) if draft.parents == Draft(seq, at, draft.tokens).tree else draft


class NoTarget:
    """The `Target` of a device, which has none: its tokeniser's name and size."""

    fingerprint, hidden_size, num_layers, weights_version = "", 0, 0, 0
    fingerprints = frozenset[str]()
    lm_head_bias = None

    def __init__(self, name: str, vocab_size: int, device: torch.device) -> None:
        self.name, self.vocab_size, self.device = name, vocab_size, device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    @property
    def lm_head_weight(self) -> Tensor:
        raise LoadError("a device has not the target model: use a draft model, or a drafter that needs no weights")

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.lm_head_weight

    def embed(self, tokens: Tensor) -> Tensor:
        return self.lm_head_weight


class Drafting:
    """Has a drafter draft behind one text, which grows, and now and then turns out to go on otherwise.

    Args:
        length: Most tokens of the text.
    """

    def __init__(self, drafter: Drafter, target: NoTarget, length: int) -> None:
        self._drafter, self._device = drafter, target.device
        self.nodes = drafter.spec.max_nodes
        self._tokens = torch.zeros(1, length, dtype=torch.long, device=target.device)
        self._text: list[int] = []
        drafter.open(Loan(target, 1, length, StageTimes()))

    @torch.inference_mode()
    def tree(self, text: list[int], confidence: float) -> DraftTree:
        """Return the tokens behind a text that are likely, each with its path, by `confidence` at least."""
        if not self.nodes or len(text) + self.nodes >= self._tokens.shape[1]:
            return DraftTree()
        self._tell(text)
        lengths = [len(text) - 1]
        context = DraftContext(self._tokens, None, torch.tensor(lengths, device=self._device), lengths)
        self._drafter.prepare(context)
        found = self._drafter.propose(context, Ask(self.nodes, confidence))
        tokens, parents, log_probs = (part[0].tolist() for part in (found.tokens, found.parents, found.log_probs))
        least = math.log(confidence) if confidence else -math.inf
        # By falling probability, so that what is kept is a tree.
        kept = sum(token >= 0 and log_prob >= least for token, log_prob in zip(tokens[1:], log_probs[1:], strict=True))
        nodes = slice(1, 1 + kept)
        return DraftTree(tokens[nodes], [parent - 1 for parent in parents[nodes]], log_probs[nodes])

    def _tell(self, text: list[int]) -> None:
        """Have the drafter know the text: what is new of it, or all from where it differs."""
        known = self._text
        common = next((n for n, pair in enumerate(zip(known, text, strict=False)) if pair[0] != pair[1]), None)
        common = min(len(known), len(text)) if common is None else common
        self._tokens[0, common : len(text)] = torch.tensor(text[common:], dtype=torch.long, device=self._device)
        if known and common == len(known):
            if new := text[common:]:
                self._drafter.observe(Committed([0], [new]))
        else:
            ids, request = np.array(text, dtype=np.int64), Request(text)
            for state in self._drafter.slots:
                if isinstance(state, SlotTensors):
                    state.copy(0, 0, common)  # keys and values up to there are right
                else:
                    state.enter(0, ids, request)
        self._text = list(text)
