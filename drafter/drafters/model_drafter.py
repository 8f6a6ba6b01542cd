"""Drafters that run a causal LM behind the sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from drafter import devices
from drafter.drafters.contract import Ask, DraftContext, Drafter, DraftSpec, Ids, Loan
from drafter.drafters.slots import SlotTensors
from drafter.drafters.target import Target
from drafter.errors import LoadError
from drafter.target_model.attention import Packing
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import TreeNodes
from drafter.tree.token_tree import Frontier, TokenTree, best_first_trie, most_places, root_only

DEPTH = 8
"""Deepest level of a tree; each costs a forward of the draft model."""
_WIDTH = 16  # nodes run per level. Trees with more draft nodes may not be optimal.
_PROMPT_TOKENS = 512  # of one forward at most


class TextReader(Drafter):
    """Runs a draft model over sequences, and over tree nodes behind them, with its own KV cache. Proposes only roots.

    With `fixed`, work depends on shapes alone, as CUDA graphs require. The host is then a step behind, and each row
    reads as many tokens as two steps may have added.

    Args:
        model: The draft model, with the target model's tokeniser, on any device.
        base: The target model: tokens are on its device and in its vocabulary.
        run: Tree nodes that are run behind a sequence at most.

    Raises:
        LoadError: The model has recurrent layers.
    """

    def __init__(self, model: BaseModel, base: Target, nodes: int, depth: int, run: int) -> None:
        if model.cache_bytes.node:
            raise LoadError(f"{model.name} has recurrent layers, and cannot draft; it can only be a target model")
        self._model, self._vocabulary = model, base.vocab_size
        beside = model.device == base.device
        kept = sum(model.kv_bytes_per_token) if beside else 0
        self.spec = DraftSpec(nodes, depth, graph_safe=beside, bytes_per_token=kept)
        self.fixed = devices.is_asynchronous(base.device) and beside
        self._usual = 2 * (depth + 1) if self.fixed else depth + 1  # new tokens of an ordinary step at most
        self._run_nodes = run

    def open(self, loan: Loan) -> None:
        """Allocate the cache; raise `LoadError` if the device has no room for it."""
        self._times = loan.times
        length = loan.length + self._usual + self._run_nodes + 1
        self.cache = self._model.new_cache(loan.slots, length)
        self._entries = SlotTensors(self.cache, self._usual, self._run_nodes)
        self.slots = [self._entries]
        self._packs = self._model.allow_packing()

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        return root_only(context.pending)

    def prepare(self, context: DraftContext) -> None:
        """Read rows that have more new tokens than an ordinary step adds; leave the others to `read`."""
        late, unread = self._entries.advance(context)
        lengths, spans = context.host_lengths, []
        for slot, count in zip(late.tolist(), unread.tolist(), strict=True):
            spans.append((slot, lengths[slot] + context.ahead + 1 - count, lengths[slot]))
        self._read_prompts(context, spans)

    def read(self, context: DraftContext, tree: TokenTree | None = None) -> Tensor:
        """Read the new tokens, and the draft nodes of a tree `[B, 1 + M]` behind them, in one forward.

        Returns log-probabilities `[B, 1 + M, V]` in the target model's vocabulary; undefined at padding.
        """
        device, rows = self._model.device, len(context.tokens)
        lengths = context.lengths.to(device)[:, None]
        count = self._unread(rows)
        chain = self._usual if self.fixed else int(count.max())
        place = torch.arange(chain, device=device)
        start = (lengths + 1 - chain).clamp_min(0)
        root = lengths - start  # index of the pending token in the chain; later entries repeat it
        tokens = context.tokens.gather(1, torch.minimum(start + place, lengths).to(context.tokens.device)).to(device)
        depths, ancestors = place.expand(rows, -1), (place <= place[:, None]).expand(rows, -1, -1)
        parents = depths - 1
        real = (place <= root).expand(rows, -1)
        if not self.fixed:
            new = devices.send(torch.from_numpy(count), device)
            real = real & (place > root - new[:, None])
        if tree is not None:
            nodes = tree.tokens[:, 1:]
            tokens = torch.cat([tokens, torch.where(nodes >= 0, nodes, tree.tokens[:, :1])], 1)
            depths = torch.cat([depths, root + tree.depths[:, 1:]], 1)
            above = tree.parents[:, 1:]
            parents = torch.cat([parents, torch.where(above > 0, above + (chain - 1), root)], 1)
            text = (place <= root)[:, None].expand(-1, nodes.shape[1], -1)
            below = torch.cat([text, tree.ancestors()[:, 1:, 1:]], 2)
            ancestors = torch.cat([F.pad(ancestors, (0, nodes.shape[1])), below], 1)
            real = torch.cat([real, nodes >= 0], 1)
        packing = None if self.fixed or not self._packs or bool(real.all()) else Packing.of(real)
        reach = max(context.longest + 1, chain) + tokens.shape[1] - chain
        logits = self._run(tokens, start[:, 0], depths, parents, ancestors, reach, packing)
        after_root = logits.gather(1, root[:, :, None].expand(-1, -1, logits.shape[2]))
        return self._log_probs(torch.cat([after_root, logits[:, chain:]], 1))

    def _unread(self, rows: int) -> Ids:
        """Return `[B]` how many tokens of each row `read` reads."""
        count = np.ones(rows, dtype=np.int64)  # where shapes must repeat, the batch may have more rows than are in use
        count[: len(self._entries.new)] = self._entries.new[:rows]
        return count

    def extend(self, context: DraftContext, frontier: Frontier) -> Tensor:
        """Run the frontier's W last nodes after `read`; return log-probabilities `[B, W, V]` as `read` does."""
        new, tokens = frontier.real, frontier.tokens[:, 1:]
        rows, size = tokens.shape
        width = new.shape[1]
        packing = None
        if self._packs and self.fixed:
            # All of the last nodes: their positions follow from the shapes.
            place, row = (torch.arange(count, device=new.device) for count in (size, rows))
            packing = Packing(
                (row[:, None] * size + place[size - width :]).flatten(),
                row[:, None] * width + (place - (size - width)).clamp_min(0),
            )
        elif self._packs and (size > width or not bool(new.all())):
            packing = Packing.of(F.pad(new, (size - width, 0)))
        lengths, depths, parents = context.lengths.to(new.device) + 1, frontier.depths[:, 1:] - 1, frontier.parents - 1
        ancestors, reach = frontier.ancestors[:, 1:, 1:], context.longest + 1 + size
        return self._log_probs(
            self._run(tokens, lengths, depths, parents[:, 1:], ancestors, reach, packing)[:, size - width :]
        )

    def _run(
        self,
        tokens: Tensor,
        lengths: Tensor,
        depths: Tensor,
        parents: Tensor,
        ancestors: Tensor,
        reach: int,
        packing: Packing | None,
    ) -> Tensor:
        """Return logits `[B, N, V']` of tree nodes; see `TreeNodes`. Clamps token ids that the draft model lacks."""
        tokens = tokens.clamp_max(self._model.vocab_size - 1)
        reach = min(reach, self.cache.length)
        nodes = TreeNodes(
            tokens=tokens,
            lengths=lengths,
            positions=lengths[:, None] + depths,
            kv_length=reach,
            packing=packing,
            parents=parents,
            ancestors=ancestors,
            follows=packing is not None,
        )
        return self._logits(nodes)

    def _logits(self, nodes: TreeNodes) -> Tensor:
        return self._model.verify(self.cache, nodes)[0]

    def _log_probs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities in the target model's vocabulary; -inf where they are NaN."""
        log_probs = logits[..., : self._vocabulary].float().log_softmax(-1)
        return torch.where(log_probs.isnan(), -torch.inf, log_probs)

    def _read_prompts(self, context: DraftContext, spans: Sequence[tuple[int, int, int]]) -> None:
        """Read spans `(slot, start, stop)`; neighbouring slots share a forward."""
        pieces = [
            (slot, first, min(first + _PROMPT_TOKENS, stop))
            for slot, start, stop in spans
            for first in range(start, stop, _PROMPT_TOKENS)
        ]
        while pieces:
            count, tokens = 1, pieces[0][2] - pieces[0][1]
            for (slot, _, _), (following, start, stop) in pairwise(pieces):
                tokens += stop - start
                if following != slot + 1 or tokens > _PROMPT_TOKENS or not self._packs:
                    break
                count += 1
            some, pieces = pieces[:count], pieces[count:]
            texts = [context.tokens[slot, start:stop].to(self._model.device) for slot, start, stop in some]
            texts = [text.clamp_max(self._model.vocab_size - 1) for text in texts]
            self._model.prefill(self.cache, some[0][0], texts, [start for _, start, _ in some])


class ModelDrafter(TextReader):
    """Best-first tree of a draft model's likeliest continuations, one forward per level.

    Only nodes among the best `nodes` so far are run: a path's probability falls along it, so no other can have a child
    in the tree.
    """

    def __init__(self, model: BaseModel, base: Target, nodes: int, depth: int = DEPTH, beam: int = _WIDTH) -> None:
        depth, self._beam = min(nodes, depth), min(nodes, beam)
        super().__init__(model, base, nodes, depth, most_places(depth, nodes + 1, self._beam) - 1)

    def propose(self, context: DraftContext, ask: Ask) -> TokenTree:
        def conditionals(frontier: Frontier) -> tuple[Tensor, Tensor]:
            # `read` takes the pending token with the new ones.
            log_probs = self.extend(context, frontier) if frontier.first else self.read(context)
            best, tokens = log_probs.topk(min(ask.nodes, log_probs.shape[2]))
            return best, self._named(tokens)

        pending = context.pending.to(self._model.device)
        depth, size = self.spec.max_depth, 1 + ask.nodes
        tree = best_first_trie(conditionals, pending, depth, size, self._beam, ask.least_probability)
        self._times.mark("draft")
        return TokenTree(*(part.to(context.tokens.device) for part in vars(tree).values()))

    def _named(self, ids: Tensor) -> Tensor:
        """Return the tokens of the columns `[...]` of `_logits`."""
        return ids
