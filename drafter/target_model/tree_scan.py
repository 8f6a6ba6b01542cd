"""Recurrences along the paths of draft trees, all nodes at once.

A linear recurrence's state after a node is the text's state, decayed, and a sum over the node and its ancestors. So a
tree takes one masked product where a text takes one step after the other. Mamba 2 (arXiv 2405.21060) writes its inputs
as they are. The gated delta rule (arXiv 2412.06464) writes corrections that depend on the state, for which a triangular
system is solved. Kimi delta attention (arXiv 2510.26692) decays each component of a key by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class TreePaths:
    """The paths of B trees of N nodes, made once for all layers of a forward.

    Args:
        parents: `[B, N]` as `TreeNodes.parents`: parents come before their children.
        ancestors: `[B, N, N]` bool; a node counts as its own.
    """

    def __init__(self, parents: Tensor, ancestors: Tensor) -> None:
        self.parents, self.ancestors = parents.clamp_min(0), ancestors
        self.depths = ancestors.sum(2) - 1  # `[B, N]`; 0 for nodes that follow the text
        self._windows: dict[int, Tensor] = {}

    @cached_property
    def levels(self) -> list[tuple[Tensor, Tensor]]:
        """Row and node `[M]` of the nodes of each depth, from the roots on. Waits for the device."""
        depths = range(int(self.depths.max()) + 1)
        found = [(self.depths == depth).nonzero(as_tuple=True) for depth in depths]
        return [(row, node) for row, node in found]

    def windows(self, size: int) -> Tensor:
        """Return `[B, N, size]` where the last inputs of each node's path lie, its own last.

        They are places in a row of the text's last `size` inputs, then the nodes'.
        """
        if size not in self._windows:
            columns, node = [], torch.arange(self.depths.shape[1], device=self.depths.device).expand_as(self.depths)
            for back in range(size):
                columns.append(torch.where(back <= self.depths, size + node, size + self.depths - back))
                node = self.parents.gather(1, node)
            self._windows[size] = torch.stack(columns[::-1], 2)
        return self._windows[size]


def convolution_windows(inputs: Tensor, state: Tensor, paths: TreePaths) -> Tensor:
    """Return the last k inputs of each node's path `[B, C, N, k]`, which are also the convolution's state after it.

    Args:
        inputs: `[B, C, N]` of the nodes.
        state: `[B, C, k]` last inputs of the text.
    """
    size, (batch, channels, nodes) = state.shape[2], inputs.shape
    places = paths.windows(size).to(inputs.device).flatten(1)[:, None].expand(-1, channels, -1)
    known = torch.cat([state.to(inputs.dtype), inputs], 2)
    return known.gather(2, places).view(batch, channels, nodes, size)


@dataclass(frozen=True)
class TreeScan:
    """What N nodes of each tree write to the state `[B, H, K, V]` of their text; all of float32.

    The state after a node n is `exp(s_n) S + Σ_a exp(s_n - s_a) k_a v_aᵀ` over its ancestors a, with itself.
    """

    state: Tensor  # `[B, H, K, V]`
    keys: Tensor  # `[B, H, N, K]`
    values: Tensor  # `[B, H, N, V]`
    sums: Tensor  # `[B, H, N, 1]`, or with a decay for each component `[B, H, N, K]`: summed log decay of the path
    ancestors: Tensor  # `[B, N, N]` bool

    def read(self, queries: Tensor) -> Tensor:
        """Return `[B, H, N, V]`: what queries `[B, H, N, K]` read from the state after each node."""
        scores = decayed_scores(queries, self.keys, self.sums, self.ancestors)
        return (queries * self.sums.exp()) @ self.state + scores @ self.values

    def after(self, row: Tensor, node: Tensor) -> Tensor:
        """Return the states `[R, H, K, V]` after one node of each of R rows."""
        sums = self.sums[row, :, node][:, :, None]  # [R, H, 1, K]
        seen = self.ancestors[row, node][:, None, :, None]
        decay = (sums - self.sums[row]).masked_fill(~seen, -torch.inf).exp()
        written = (self.keys[row] * decay).mT @ self.values[row]
        return sums.mT.exp() * self.state[row] + written

    @property
    def node_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.sums.nbytes


def path_sums(values: Tensor, ancestors: Tensor) -> Tensor:
    """Sum values `[B, H, N, D]` along the path to each node."""
    return ancestors[:, None].to(values.dtype) @ values


def decayed_scores(queries: Tensor, keys: Tensor, sums: Tensor, seen: Tensor) -> Tensor:
    """Return `[B, H, N, N]` products of queries with keys that are `seen` `[B, N, N]`, decayed on the way.

    `sums` `[B, H, N, 1 or K]` are those of `TreeScan`.
    """
    between = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(~seen[:, None, :, :, None], -torch.inf).exp()
    if between.shape[-1] == 1:
        return queries @ keys.mT * between[..., 0]
    return torch.einsum("bhnk,bhnak,bhak->bhna", queries, between, keys)


def delta_values(state: Tensor, keys: Tensor, values: Tensor, rates: Tensor, sums: Tensor, ancestors: Tensor) -> Tensor:
    """Return `[B, H, N, V]` what each node writes by the delta rule: its `rate` × (value - what its key reads so far).

    Args:
        rates: `[B, H, N, 1]`.
    """
    nodes = ancestors.shape[1]
    strict = ancestors & ~torch.eye(nodes, dtype=torch.bool, device=ancestors.device)
    system = rates * decayed_scores(keys, keys, sums, strict)
    right = rates * (values - (keys * sums.exp()) @ state)
    # Parents come before children, so that the system is triangular.
    solved: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return solved
