"""Forced acceptance: how fast a system would be with a drafter of another worth, at the real one's cost.

The answers are known before, so a draft tree can be given as many right tokens as are to be accepted. Text, verifier
and all other work stay as they are. Others force acceptance in the verifier instead, and their text is noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from drafter.drafters.contract import Ask, DraftContext, Drafter, Ids, Loan, SlotState
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.slots import SlotObjects
from drafter.errors import LoadError
from drafter.evaluation.questions import Prompt
from drafter.requests import Request
from drafter.tree.token_tree import PAD_TOKEN, TokenTree

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""Plain decoding's answers, by the tokens of their prompts and their seeds."""


def known_answers(prompts: Sequence[Prompt]) -> Answers:
    return {_key(one.request): one.answer for one in prompts}


def _key(request: Request) -> tuple[int, ...]:
    return (*request.prompt_ids, request.sampling.over().seed)


@dataclass
class _Row:
    """A sequence whose `answer` is known; `steps` counts the trees that were made for it."""

    begin: int  # committed tokens before the answer
    answer: Sequence[int]
    steps: int = 0


class ForcedAcceptance(MergedDrafter):
    """Changes a drafter's trees, so that a step yields `beta` tokens on average.

    A tree is as deep and as large as the drafter made it, so no more is accepted than its deepest path has. Requests
    without a known answer, such as those of a warm-up, keep the drafter's tokens.

    Raises `LoadError` if the drafter chooses among several: it would learn what they are not worth.
    """

    def __init__(self, drafter: Drafter, answers: Answers, beta: float) -> None:
        if drafter.members:
            raise LoadError("acceptance cannot be forced upon a drafter that chooses, such as auto: name one")
        super().__init__(drafter)
        self.spec = replace(drafter.spec, graph_safe=False)  # the host changes its trees
        self._answers, self._accepted = answers, beta - 1.0

    def open(self, loan: Loan) -> None:
        super().open(loan)
        self._rows = SlotObjects(loan.slots, self._begin)

    def _begin(self, text: Ids, request: Request | None) -> _Row | None:
        if request is None or (answer := self._answers.get(_key(request))) is None:
            return None
        return _Row(len(request.prompt_ids) - 1, answer)

    @property
    def slots(self) -> Sequence[SlotState]:  # type: ignore[override]
        return [*super().slots, self._rows]

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        tree = super().propose(context, ask)
        tokens, parents, depths = (part.tolist() for part in (tree.tokens, tree.parents, tree.depths))
        for slot, length in enumerate(context.host_lengths):
            if (row := self._rows.rows[slot]) is not None:
                # Whole numbers of tokens whose mean is the wanted one, as evenly as they can come.
                wanted = int(self._accepted * (row.steps + 1)) - int(self._accepted * row.steps)
                row.steps += 1
                text = row.answer[length - row.begin :]
                tokens[slot] = with_accepted(tokens[slot], parents[slot], depths[slot], text, wanted)
        return replace(tree, tokens=torch.tensor(tokens).to(tree.tokens.device))


def with_accepted(
    tokens: Sequence[int], parents: Sequence[int], depths: Sequence[int], text: Sequence[int], wanted: int
) -> list[int]:
    """Return the tokens of a tree's nodes, root first, of which the next `wanted` of `text` are accepted, if it can be.

    The most probable node of that depth, or of the greatest depth that there is, ends the path; all other nodes have a
    token that does not come.
    """
    drafted = [node for node in range(1, len(tokens)) if tokens[node] != PAD_TOKEN]
    wanted = min(wanted, len(text), max((depths[node] for node in drafted), default=0))
    node, path = next((node for node in drafted if depths[node] == wanted), 0) if wanted else 0, set[int]()
    while node:
        path.add(node)
        node = parents[node]
    found = list(tokens)
    for node in drafted:
        right = text[depths[node] - 1] if depths[node] <= len(text) else PAD_TOKEN
        if node in path:
            found[node] = right
        elif found[node] == right:
            found[node] = int(not right)
    return found
