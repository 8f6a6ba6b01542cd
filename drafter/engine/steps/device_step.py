"""The stages of a step that the device does: draft, verify, accept, commit. Nothing here waits for it."""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.base.causal_lm import BaseModel
from drafter.base.executors.contract import TreeNodes
from drafter.base.packing import Packing
from drafter.drafters.contract import Ask, DraftContext
from drafter.engine.batch_state import BatchState
from drafter.engine.steps.outcome import StepOutcome
from drafter.tree.token_tree import TokenTree, root_only
from drafter.verifiers.contract import Verified, Verifier
from drafter.verifiers.likeliest import are_sound
from drafter.verifiers.path_logprobs import path_logprobs


class DeviceStep:
    """The stages over the first slots of a batch state.

    Args:
        base: The base model.
        verifier: Decides what is accepted.
        state: What the device holds.
        packs: Whether trees of different sizes are verified without their padding, which needs to know how many nodes
            there are and so waits for the device.
    """

    def __init__(self, base: BaseModel, verifier: Verifier, state: BatchState, *, packs: bool) -> None:
        self.base, self.verifier, self.state, self.packs = base, verifier, state, packs
        self._hidden_layers = (*state.drafter.spec.hidden_layers, *verifier.hidden_layers)
        self._drafter_width = len(state.drafter.spec.hidden_layers) * base.hidden_size

    def draft(self, context: DraftContext, ask: Ask) -> TokenTree:
        """Trees `[B, 1 + ask.nodes]`; a lone root where no nodes are asked for."""
        return self.state.drafter.propose(context, ask) if ask.nodes else root_only(context.pending)

    def verify(self, tree: TokenTree, kv_length: int) -> Verified:
        """Run the base over `tree` `[B, N]` of the first B slots, reading `kv_length` cache positions."""
        rows, depth = len(tree.tokens), self._depth(tree)
        ancestors = tree.ancestors(depth)
        packing = Packing.of(tree.tokens >= 0) if self.packs and rows > 1 and tree.size > 1 else None
        nodes = TreeNodes(
            # Padding repeats the root: whatever other token stood there, its numbers might not be finite.
            torch.where(tree.tokens >= 0, tree.tokens, tree.tokens[:, :1]),
            self.state.lengths[:rows],
            tree.depths,
            ancestors,
            kv_length,
            packing,
            self._hidden_layers,
            self.state.max_length,
        )
        logits, hidden = self.base.verify(self.state.cache, nodes)
        if not self.verifier.hidden_layers:
            return Verified(tree, ancestors, depth, logits, hidden)
        ours, read = hidden[..., : self._drafter_width], hidden[..., self._drafter_width :]
        return Verified(tree, ancestors, depth, logits, ours, read)

    def accept(self, verified: Verified, rows: slice) -> StepOutcome:
        """Let the verifier decide on the trees of `rows`, commit the accepted paths, and pack the outcome."""
        state = self.state
        accepted = self.verifier.accept(verified, state.row_sampling(rows))
        logprobs = None
        if wanted := self.wanted_logprobs(rows):
            logprobs = path_logprobs(verified.logits, accepted, list(wanted), max(wanted.values()))
        sound = are_sound(verified.logits)  # one node that is not finite spoils the whole tree
        outcome = StepOutcome.pack(verified.tree, accepted, sound, logprobs)
        state.commit(accepted, verified.hidden, sound, rows)
        return outcome

    def accept_prompt_end(self, slot: int, pending: Tensor, logits: Tensor, hidden: Tensor) -> StepOutcome:
        """A plain step of one slot whose logits come with the forward over its prompt's end.

        Args:
            slot: The slot.
            pending: `[1]` its pending token.
            logits: `[1, 1, V]` after that.
            hidden: `[1, 1, K · d]` of that.
        """
        tree = root_only(pending)
        return self.accept(Verified(tree, tree.ancestors(0), 0, logits, hidden), slice(slot, slot + 1))

    def wanted_logprobs(self, rows: slice) -> dict[int, int]:
        """Which of `rows`, counted from their first, want how many log-probabilities."""
        return {
            slot - rows.start: count for slot, count in self.state.logprobs.items() if rows.start <= slot < rows.stop
        }

    def _depth(self, tree: TokenTree) -> int:
        return min(self.state.drafter.spec.max_depth, tree.size - 1)
