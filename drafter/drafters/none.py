"""`none`: drafts nothing. Verifying a lone root is plain decoding, in the same loop as everything else."""

from __future__ import annotations

from drafter.drafters.contract import DraftContext, Drafter
from drafter.tree.token_tree import TokenTree, root_only


class PlainDecoding(Drafter):
    """Trees that are only a root."""

    tree_size = 1
    depth = 0

    def propose(self, context: DraftContext, size: int) -> TokenTree:
        """Trees `[B, 1]`."""
        return root_only(context.pending)
