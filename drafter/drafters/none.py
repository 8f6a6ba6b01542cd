"""`none`: drafts nothing. To verify a lone root is plain decoding, in the same loop as everything else."""

from __future__ import annotations

from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec
from drafter.tree.token_tree import TokenTree, root_only


class PlainDecoding(Drafter):
    """Proposes trees that are only a root."""

    spec = DraftSpec(max_nodes=0, max_depth=0)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1]`."""
        return root_only(context.pending)
