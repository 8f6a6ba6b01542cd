"""`forced`: drafts nothing itself. What a grammar forces is drafted with any drafter; here it is all there is."""

from __future__ import annotations

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Loading
from drafter.tree.token_tree import TokenTree, root_only


class ForcedDrafter(Drafter):
    def __init__(self, nodes: int) -> None:
        self.spec = DraftSpec(nodes, nodes)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        return root_only(context.pending)


def forced(loading: Loading) -> ForcedDrafter:
    return ForcedDrafter(loading.nodes)
