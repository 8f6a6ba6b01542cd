"""A table of token n-grams that keeps what was used last: what has followed some tokens, newest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from drafter.drafters.tables.contract import Gram, Table


class LruTable(Table):
    """From *leaders*, the last tokens of a text, to *followers*, the tokens after them (arXiv 2511.21699).

    A window slides over every text, and each place is a use of a leader and of its follower. A leader has a bounded
    number of followers, and the table of leaders. What was used least recently falls out.

    Args:
        leaders: Leaders at most.
        followers: Followers of a leader at most.
        leader_length: Tokens of a leader.
        follower_length: Tokens of a follower.
    """

    def __init__(self, leaders: int, followers: int, leader_length: int = 1, follower_length: int = 3) -> None:
        self._most_leaders, self._most_followers = leaders, followers
        self.leader_length, self.window = leader_length, leader_length + follower_length
        # The newest is last in both.
        self._followers: OrderedDict[Gram, dict[Gram, None]] = OrderedDict()

    def __len__(self) -> int:
        """Leaders there are."""
        return len(self._followers)

    def learn(self, tokens: Sequence[int]) -> None:
        """Slide the window over `tokens`; those of a text that goes on begin with its last `window - 1` known ones."""
        for start in range(len(tokens) - self.window + 1):
            end = start + self.leader_length
            self._use(tuple(tokens[start:end]), tuple(tokens[end : start + self.window]))

    def followers(self, leader: Gram) -> Iterator[Gram]:
        """The followers of a leader, newest first."""
        return reversed(self._followers.get(leader, ()))

    def _use(self, leader: Gram, follower: Gram) -> None:
        followers = self._followers.setdefault(leader, {})
        self._followers.move_to_end(leader)
        followers.pop(follower, None)
        followers[follower] = None
        if len(followers) > self._most_followers:
            del followers[next(iter(followers))]
        if len(self._followers) > self._most_leaders:
            self._followers.popitem(last=False)
