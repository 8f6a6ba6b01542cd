"""Interface of verifiers, which decide from the target model's logits which draft tokens become output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from drafter.acceptance.choices import RowSampling
from drafter.requests import SamplingParams
from drafter.target.model import BaseModel
from drafter.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Verified:
    """Draft trees with the target model's outputs at their nodes.

    Args:
        tree: `[B, N]` nodes, root included.
        ancestors: `[B, N, N]` bool, of the tree.
        depth: Bound of the nodes' depths.
        logits: `[B, N, V]` by node id.
        hidden: `[B, N, K · d]` hidden states by node id that the drafter reads.
        read: `[B, N, J · d]` hidden states by node id that the verifier reads; None if it reads none, or there are no
            draft tokens.
    """

    tree: TokenTree
    ancestors: Tensor
    depth: int
    logits: Tensor
    hidden: Tensor
    read: Tensor | None = None


@dataclass(frozen=True)
class Accepted:
    """Accepted path down each tree, and the tokens that are emitted.

    Args:
        path: `[B, D + 1]` node ids from the root down, rising; entries past `count` are 0.
        tokens: `[B, D + 1]` emitted tokens: the accepted draft tokens and, at `count`, the target model's bonus token.
            Entries past it are undefined.
        count: `[B]` draft tokens accepted; `count + 1` tokens are emitted.
        lenient: `[B, D + 1]` bool: tokens that the target model would not have chosen; None if there can be none.
    """

    path: Tensor
    tokens: Tensor
    count: Tensor
    lenient: Tensor | None = None


class Verifier(ABC):
    """Decides which draft tokens become output, independently of the drafter."""

    name: ClassVar[str]
    """Name in settings and results."""
    lossless: ClassVar[bool]
    """True if the output is exactly that of plain decoding. Otherwise all output is marked."""
    lookahead: int = 0
    """Draft tokens after a mismatch that the decision needs; the drafter must be able to go so deep."""

    hidden_layers: tuple[int, ...] = ()
    """The J hidden states of draft tokens that it reads; see `DraftSpec.hidden_layers`."""

    def open(self, base: BaseModel) -> None:  # noqa: B027 - most verifiers fit every base
        """Prepare for a target model. Called once, before everything else.

        Raises:
            LoadError: The verifier was made for another target model.
        """

    @property
    def settings(self) -> Mapping[str, float]:
        """Its numeric settings, which go into results beside `name`."""
        return {}

    def refuse(self, sampling: SamplingParams) -> None:  # noqa: B027 - most verifiers take all settings
        """Raise `RequestError` for a request whose settings the method does not define."""

    @abstractmethod
    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        """Choose a path down each tree.

        On a GPU this is recorded as a graph: it must depend only on the tensors and their shapes, and must not
        synchronise.
        """
