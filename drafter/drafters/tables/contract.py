"""What a search for drafts asks of a table of n-grams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

Gram = tuple[int, ...]


class Table(ABC):
    """From *leaders*, the last tokens of a text, to *followers*, tokens that have come after them.

    Attributes:
        leader_length: Tokens of a leader.
    """

    leader_length: int

    @abstractmethod
    def followers(self, leader: Gram) -> Iterator[Gram]:
        """The followers of a leader, likeliest first."""
