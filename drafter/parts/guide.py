"""The guide of a row: the state of a grammar, for one, after its output.

It walks its row's tree depth first, and returns to where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from drafter.acceptance.guide import Guide, Guides, PutOff
from drafter.engine.handle import Handle
from drafter.parts.contract import Room, Row, Steering
from drafter.tree.paths import ROOT, RowDrafts, children_of


class GuidePart(Steering):
    """Lets a row's output follow a guide, and notes the tokens that this leaves no choice about."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide
        self._forced: list[int] = []  # indices of output

    def before_step(self, drafts: RowDrafts, depth: int) -> tuple[RowDrafts, int]:
        guide, children, found, begun = self._guide, children_of(drafts.parents), RowDrafts(), 0

        def visit(place: int, node: int | None, level: int, log_prob: float) -> None:
            """Add what may follow `place` of `found`, at depth `level`; nobody drafted that place if `node` is None."""
            nonlocal begun
            if level > depth:
                return
            below = {} if node is None else {drafts.tokens[child]: child for child in children[node]}
            candidates: dict[int, tuple[int | None, float]]
            candidates = {token: (child, drafts.log_probs[child]) for token, child in below.items()}
            if run := guide.forced():
                candidates = {run[0]: (below.get(run[0]), log_prob)}
                begun += begun == level - 1 == place + 1  # a chain so far
            for token, (child, own) in candidates.items():
                if guide.consume(token):
                    visit(found.add(token, place, level, own), child, level + 1, own)
                    guide.rewind(1)

        visit(ROOT, ROOT, 1, 0.0)
        return found, begun

    def allow(self, mask: Tensor, drafts: RowDrafts, later: PutOff) -> None:
        guide, children = self._guide, children_of(drafts.parents)

        def visit(node: int) -> None:
            guide.fill(mask[1 + node], later)
            for child in children[node]:
                if guide.consume(drafts.tokens[child]):
                    visit(child)
                    guide.rewind(1)

        visit(ROOT)

    def after_token(self, row: Row) -> Literal["refused"] | None:
        token = row.output[-1]
        forced = next(iter(self._guide.forced()), None) == token
        if not self._guide.consume(token):
            return "refused"
        if forced:
            self._forced.append(len(row.output) - 1)
            row.counts.num_forced_tokens += 1
        return None

    def problem(self, tokens: int) -> str:
        why = self._guide.problem or "its grammar and the other settings allow none there"
        return f"structured_outputs: no token is left to choose after {tokens} generated ones: {why}"

    def result(self, row: Row) -> Mapping[str, Any]:
        return dict[str, Any](forced=self._forced, valid=self._guide.valid)


def guide_room(guides: Guides) -> Room:
    """Return what makes the parts of requests with `structured_outputs`, of which the first one takes a second."""

    def room(handle: Handle) -> GuidePart | None:
        request = handle.request
        asked = request.sampling.structured_outputs
        return None if asked is None else GuidePart(guides.guide(asked, request.prompt_ids, request.salt))

    return room
