"""Data between engines and a learner: finished rows one way, head versions the other.

Both live on the CPU and can be pickled. Neither side waits for the other: rows that are not taken are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class RowSample:
    """A finished row.

    Args:
        request_id: The caller's id.
        tokens: `[T]` int64 prompt and output, on the CPU.
        prompt_length: At least 1.
        hidden: `[T, K · d]` the target model's hidden states that the head reads (`DraftHead.hidden_layers`), in its
            dtype, on the CPU. The last token's are undefined: nothing is drafted after it. With None a learner runs the
            target model over the text.
        steps: Decode steps that the output took.
    """

    request_id: str
    tokens: Tensor
    prompt_length: int
    hidden: Tensor | None
    steps: int

    @property
    def surprise(self) -> float:
        """Decode steps per token, in (0, 1]: 1 / β, and 1 where no draft was right."""
        return min(self.steps / max(len(self.tokens) - self.prompt_length, 1), 1.0)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


@dataclass(frozen=True)
class HeadVersion:
    """Weights of a head that beat the version before.

    Args:
        number: Counts up from 1; engines begin with 0.
        weights: Name → tensor of `DraftHead.state_dict()`, in fp32, on the CPU.
        beta: β of these weights by the simulated walk over held-out rows.
        beta_before: β of the previous version on the same rows; 1.0, plain decoding's, without one.
        provenance: Steps, rows, seconds; becomes `Provenance.training` of a head's folder; JSON.
    """

    number: int
    weights: dict[str, Tensor]
    beta: float
    beta_before: float
    provenance: dict[str, Any] = field(default_factory=dict)
