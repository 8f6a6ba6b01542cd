"""Rejected draft tokens, noted while the base decodes exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.verifiers.choices import RowSampling
from drafter.verifiers.contract import Accepted, Verified
from drafter.verifiers.exact import ExactVerifier
from drafter.verifiers.lenient.node_views import shannon_entropy


@dataclass(frozen=True)
class Rejection:
    """A draft token that was rejected.

    Args:
        prefix: Prompt and output before it.
        prompt_tokens: How many of these are the prompt's.
        rejected: The token.
        chosen: The base's own choice in its place.
        entropy: Of the base's distribution there, in nats.
        probability: p(x) of the rejected token by that distribution.
        hidden: `[d]` fp32, on the host: the base's hidden state of the rejected token.
    """

    prefix: list[int]
    prompt_tokens: int
    rejected: int
    chosen: int
    entropy: float
    probability: float
    hidden: Tensor


class RecordingVerifier(ExactVerifier):
    """The exact verifier, which notes at each step the token that is rejected where the accepted path ends.

    Of several children there, it is the first: the one that the drafter finds most probable. To note it is to wait for
    the device, so that steps are no CUDA graphs. Slots that are empty or not sound are noted as well: a caller keeps
    what continues a text that it knows.

    Args:
        layer: The base's layer whose output is noted, counted from 0.
    """

    def __init__(self, layer: int) -> None:
        self.hidden_layers = (layer,)
        self._noted: list[Rejection] = []

    def take(self) -> list[Rejection]:
        """Return what has been noted since the last call."""
        noted, self._noted = self._noted, []
        return noted

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        """Accept exactly; see `Verifier.accept`."""
        accepted = super().accept(verified, sampling)
        if verified.read is not None and verified.tree.size > 1:
            self._note(verified, verified.read, sampling, accepted)
        return accepted

    def _note(self, verified: Verified, read: Tensor, sampling: RowSampling, accepted: Accepted) -> None:
        tree, count = verified.tree, accepted.count[:, None]
        last, chosen = accepted.path.gather(1, count), accepted.tokens.gather(1, count)[:, 0]
        rows = torch.arange(len(count), device=count.device)
        first = tree.first_children().gather(1, last)[:, 0]
        child = first.clamp_max(tree.size - 1)
        tokens = tree.tokens[rows, child].clamp_min(0)
        log_probs = verified.logits[rows, last[:, 0]].double().log_softmax(-1)
        entropy, probability = shannon_entropy(log_probs), log_probs.gather(1, tokens[:, None])[:, 0].exp()
        hidden, texts = read[rows, child].float().cpu(), sampling.tokens.cpu()
        prompts = sampling.table.prompt_lengths[sampling.rows]
        numbers = (first, tokens, chosen, accepted.count, sampling.lengths, prompts, entropy, probability)
        for row, (node, token, choice, drafts, length, prompt, uncertain, likely) in enumerate(
            zip(*(one.tolist() for one in numbers), strict=True)
        ):
            if node < tree.size:
                path = accepted.tokens[row, :drafts].tolist()
                prefix = [*texts[row, : length + 1].tolist(), *path]
                self._noted.append(Rejection(prefix, prompt, token, choice, uncertain, likely, hidden[row].clone()))
