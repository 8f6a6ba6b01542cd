"""The contract of verifiers: what the base says at the nodes of a draft tree decides which tokens become output."""

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
    """Draft trees, and what the base says at their nodes.

    Args:
        tree: `[B, N]` nodes, root included.
        ancestors: `[B, N, N]` bool, of the tree.
        depth: No node lies deeper below the root.
        logits: `[B, N, V]` by node id.
        hidden: `[B, N, K · d]` hidden states by node id, as many as the drafter reads.
        read: `[B, N, J · d]` hidden states by node id that the verifier reads; None where it reads none, or where there
            are no draft nodes.
    """

    tree: TokenTree
    ancestors: Tensor
    depth: int
    logits: Tensor
    hidden: Tensor
    read: Tensor | None = None


@dataclass(frozen=True)
class Accepted:
    """What becomes output: a path down each tree.

    Args:
        path: `[B, D + 1]` node ids from the root down, rising; entries past `count` are 0.
        tokens: `[B, D + 1]` the tokens that are emitted: the accepted draft tokens and, at `count`, one more token of
            the base's own, the bonus token. Entries past it are meaningless.
        count: `[B]` draft tokens accepted; `count + 1` tokens are emitted.
        lenient: `[B, D + 1]` bool: which of `tokens` the base would not have chosen; None where none can be.
    """

    path: Tensor
    tokens: Tensor
    count: Tensor
    lenient: Tensor | None = None


class Verifier(ABC):
    """Decides which draft tokens become output. It never knows who drafted them."""

    name: ClassVar[str]
    """What it is called in settings and in results."""
    lossless: ClassVar[bool]
    """Whether the tokens are exactly those of plain decoding. If not, all output is marked."""
    lookahead: int = 0
    """How many draft tokens after a mismatch the decision needs; the drafter must be able to go so deep."""

    hidden_layers: tuple[int, ...] = ()
    """The J hidden states that it reads of draft nodes; see `DraftSpec.hidden_layers`."""

    def open(self, base: BaseModel) -> None:  # noqa: B027 - most verifiers fit every base
        """Get ready for a base. Called once, before everything else.

        Raises:
            LoadError: It was made for another base.
        """

    @property
    def settings(self) -> Mapping[str, float]:
        """The numbers that it decides by, by name; they go into results beside `name`."""
        return {}

    def refuse(self, sampling: SamplingParams) -> None:  # noqa: B027 - most verifiers take all settings
        """Raise `RequestError` for a request whose settings the method does not define."""

    @abstractmethod
    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        """Choose a path down each tree.

        On a GPU this is recorded and repeated: what is done must depend on the tensors and their shapes alone, and must
        not wait for the device.

        Args:
            verified: The trees and what the base says.
            sampling: How the rows choose tokens; see `drafter.acceptance.choices`.
        """
