"""`forced`: drafts nothing itself. What a grammar forces is drafted with any drafter; here it is all there is."""

from __future__ import annotations

from drafter.drafters.contract import DraftSpec, Loading, PlainDecoding


class ForcedDrafter(PlainDecoding):
    def __init__(self, nodes: int) -> None:
        self.spec = DraftSpec(nodes, nodes)


def forced(loading: Loading) -> ForcedDrafter:
    return ForcedDrafter(loading.nodes)
