"""What goes between engines and a learner: rows that have ended, and versions of a head.

Both are plain data on the CPU and can be pickled. An engine hands out rows and takes versions; a learner takes rows and
hands out versions. Neither knows of the other, and neither waits for the other: rows that nobody takes are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class RowSample:
    """A row that has ended, as a learner reads it.

    Args:
        request_id: The caller's name for it.
        tokens: `[T]` int64 prompt and output, on the CPU.
        prompt_length: How many of these are the prompt, at least 1.
        hidden: `[T, K · d]` the base's hidden states of these tokens that the head reads (`DraftHead.hidden_layers`),
            in the base's dtype, on the CPU. The last token's mean nothing: nothing is drafted after it. With None a
            learner runs its base over the text.
        steps: Decode steps that the output took.
    """

    request_id: str
    tokens: Tensor
    prompt_length: int
    hidden: Tensor | None
    steps: int

    @property
    def surprise(self) -> float:
        """Decode steps for a token, in (0, 1]: 1 where no draft was right, 1 / β in general."""
        return min(self.steps / max(len(self.tokens) - self.prompt_length, 1), 1.0)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.tokens.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


@dataclass(frozen=True)
class HeadVersion:
    """Weights of a head that are better than those before.

    Args:
        number: Counts up from 1; 0 is what engines begin with.
        weights: Name → tensor of `DraftHead.state_dict()`, in fp32, on the CPU.
        beta: β of these weights by the simulated walk over rows that were held out.
        beta_before: β on the same rows of the version before; 1.0, plain decoding's, where there was none.
        provenance: How they came about (steps, rows, seconds), as `Provenance.training` of a head's folder; JSON.
    """

    number: int
    weights: dict[str, Tensor]
    beta: float
    beta_before: float
    provenance: dict[str, Any] = field(default_factory=dict)
