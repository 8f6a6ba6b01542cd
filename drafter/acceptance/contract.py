"""Verifiers, which decide from the target model's logits which draft tokens become output: interface and exact one."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from drafter import devices
from drafter.acceptance.choices import NodeChoices, RowSampling
from drafter.acceptance.settings import VerifierSettings
from drafter.errors import LoadError
from drafter.json_fields import from_json
from drafter.plugins import resolved
from drafter.requests import SamplingParams, TokenLogprob
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Verified:
    """Draft trees with the target model's outputs at their nodes, by node id."""

    tree: TokenTree  # `[B, N]` nodes, root included
    ancestors: Tensor  # `[B, N, N]` bool, of the tree
    depth: int  # bound of the nodes' depths
    logits: Tensor  # `[B, N, V]`
    hidden: Tensor  # `[B, N, K · d]` hidden states that the drafter reads
    read: Tensor | None = None  # `[B, N, J · d]` those that the verifier reads; None if there are no draft tokens
    allowed: Tensor | None = None  # `[B, N, ceil(V / 32)]` int32, what guides let follow each node; see `NodeChoices`

    def choices(self, sampling: RowSampling) -> NodeChoices:
        return NodeChoices(self.logits, self.tree, self.ancestors, sampling, self.allowed)


@dataclass(frozen=True)
class Accepted:
    """Accepted path down each tree, and the tokens that are emitted.

    These are the accepted draft tokens and, at `count`, the target model's bonus token; entries past it are undefined.
    """

    path: Tensor  # `[B, D + 1]` node ids from the root down, rising; entries past `count` are 0
    tokens: Tensor  # `[B, D + 1]` emitted tokens
    count: Tensor  # `[B]` draft tokens accepted; `count + 1` tokens are emitted
    lenient: Tensor | None = None  # `[B, D + 1]` bool: tokens that the target model would not have chosen
    sound: Tensor | None = None  # `[B]` what `are_sound` says of the logits, where the verifier has looked at them all


class Verifier(ABC):
    """Decides which draft tokens become output, independently of the drafter."""

    name: ClassVar[str]  # name in settings and results
    lossless: ClassVar[bool]  # true if the output is exactly that of plain decoding; otherwise all output is marked
    lookahead: int = 0  # draft tokens after a mismatch that the decision needs; the drafter must be able to go so deep

    hidden_layers: tuple[int, ...] = ()
    """The J hidden states of draft tokens that it reads; see `DraftSpec.hidden_layers`."""

    def open(self, base: BaseModel) -> None:  # noqa: B027 - most verifiers fit every base
        """Prepare for a target model; raise `LoadError` if made for another. Called once, before everything else."""

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


class ExactVerifier(Verifier):
    """Accepts a draft token if and only if the target model chooses it there, which is lossless."""

    name = "exact"
    lossless = True

    def accept(self, verified: Verified, sampling: RowSampling) -> Accepted:
        choices = verified.choices(sampling)
        if choices.plain:
            chosen, sound = choices.everywhere()
            return replace(walk(verified.tree, chosen, verified.ancestors, verified.depth), sound=sound)
        return descend(verified.tree, choices.at, verified.depth)


def make_verifier(settings: VerifierSettings) -> Verifier:
    """Return the verifier that settings ask for; raise `LoadError` for one that cannot be used."""
    verifiers: dict[str, type[Verifier]] = {ExactVerifier.name: ExactVerifier, **resolved("verifiers")}
    if settings.name not in verifiers:
        raise LoadError(f"no verifier {settings.name!r}: there are {', '.join(verifiers)}")
    made, given = verifiers[settings.name], settings.settings
    own = list(inspect.signature(made).parameters)
    if foreign := sorted(set(given) - set(own)):
        has = f"it has {', '.join(own)}" if own else "it has no settings"
        raise LoadError(f"the verifier {settings.name} has no {foreign[0]}: {has}")
    if infinite := [name for name, value in given.items() if isinstance(value, float) and not math.isfinite(value)]:
        raise LoadError(f"verifier {settings.name}: {infinite[0]} must be a finite number")
    kinds = get_type_hints(made.__init__)
    try:
        return made(**{name: from_json(kinds.get(name, Any), value, path=(name,)) for name, value in given.items()})
    except LoadError:
        raise
    except ValueError as error:
        raise LoadError(f"verifier {settings.name}: {error}") from error


def refuse_shallow(verifier: Verifier, depth: int) -> None:
    """Raise `LoadError` if a verifier looks farther ahead than trees of this `depth` go."""
    if verifier.lookahead > depth:
        raise LoadError(
            f"verifier {verifier.name} looks {verifier.lookahead} draft tokens ahead, and this drafter drafts only "
            f"{depth}: use a deeper drafter"
        )


def walk(tree: TokenTree, choices: Tensor, ancestors: Tensor, depth: int) -> Accepted:
    """Descend from the root while a child carries the token that the target model chose.

    Root 7 with children 3 and 5, and 4 below 5; the target model chooses 5 at the root, 4 at node 5, 9 at node 4::

        tokens  [7, 3, 5, 4]   parents [0, 0, 0, 2]   choices [5, 1, 4, 9]
        path    [0, 2, 3]      tokens  [5, 4, 9]      count 2

    Args:
        choices: `[B, N]` the target model's choice after each node, by node id.
    """
    if tree.size == 1:
        return Accepted(tree.parents, choices, torch.zeros_like(choices[:, 0]))
    if not devices.is_asynchronous(choices.device):
        return _walk_on_host(tree, choices, depth)
    carries = tree.tokens == choices.gather(1, tree.parents)
    carries[:, 0].fill_(True)
    accepted = (carries[:, None, :] | ~ancestors).all(dim=2)
    depths = torch.where(accepted, tree.depths, 0)
    nodes = torch.arange(tree.size, device=choices.device).expand_as(depths)
    path = depths.new_zeros(depths.shape[0], depth + 1).scatter_reduce(
        1, depths, torch.where(accepted, nodes, 0), reduce="amax"
    )
    return Accepted(path, choices.gather(1, path), depths.amax(dim=1))


def _walk_on_host(tree: TokenTree, choices: Tensor, depth: int) -> Accepted:
    """Return what `walk` returns, node by node: a dozen operations on tensors of a few numbers take longer."""
    paths, counts = [], []
    for tokens, parents, chosen in zip(tree.tokens.tolist(), tree.parents.tolist(), choices.tolist(), strict=True):
        path, depths = [0] * (depth + 1), {0: 0}  # depths: of accepted nodes
        for node in range(1, tree.size):  # parents come before their children
            above = depths.get(parents[node])
            if above is not None and tokens[node] == chosen[parents[node]]:
                depths[node] = above + 1
                path[above + 1] = node
        paths.append(path)
        counts.append(max(depths.values()))
    nodes = torch.tensor(paths)
    return Accepted(nodes, choices.gather(1, nodes), torch.tensor(counts))


def descend(tree: TokenTree, choose: Callable[[Tensor, Tensor], Tensor], depth: int) -> Accepted:
    """Return what `walk` returns, but choose only at the nodes on the path, for expensive choices.

    `choose` returns the target model's choices `[R]` for (rows `[R]`, nodes `[R]`).
    """
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device)
    ids = torch.arange(tree.size, device=rows.device)
    node, count = torch.zeros_like(rows), torch.zeros_like(rows)
    path, tokens = (rows.new_zeros(len(rows), depth + 1) for _ in range(2))
    for level in range(depth + 1):
        token = choose(rows, node)
        tokens[rows, level] = token
        if level == depth:
            break
        child = (tree.parents[rows] == node[:, None]) & (tree.tokens[rows] == token[:, None])
        child &= (ids > 0) & (count[rows] == level)[:, None]
        found, node = child.any(1), torch.where(child, ids, 0).amax(1)
        # A GPU would have to synchronise to drop ended rows; there they go on, and nothing reads the results.
        if not devices.is_asynchronous(rows.device):
            rows, node, found = rows[found], node[found], found[found]
            if not len(rows):
                break
        path[rows, level + 1] = node
        count[rows] += found
    return Accepted(path, tokens, count)


@dataclass(frozen=True)
class PathLogprobs:
    """Log-probabilities along the paths of R rows, on the device. Entries past an accepted path are undefined."""

    chosen: Tensor  # `[R, D + 1]` float32, of the choice at each node of the path
    top_tokens: Tensor  # `[R, D + 1, K]` the most probable tokens there, descending
    top: Tensor  # `[R, D + 1, K]` float32, of those
    ranks: Tensor  # `[R, D + 1]` of the choices, from 1

    def to_host(self) -> PathLogprobs:
        """Copy to the host; valid once queued work is done."""
        return PathLogprobs(*(tensor.to("cpu", non_blocking=True) for tensor in vars(self).values()))

    def read(self, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[TokenLogprob]]:
        """Return log-probabilities of each row's `tokens`, and of its `counts` ≤ K best; tensors on the host."""
        rows = zip(tokens, counts, *(tensor.tolist() for tensor in vars(self).values()), strict=True)
        return [
            [
                TokenLogprob(token, logprob, tuple(zip(best[:count], values[:count], strict=True)), rank)
                for token, logprob, best, values, rank in zip(row, *found, strict=False)
            ]
            for row, count, *found in rows
        ]


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> PathLogprobs:
    """Return the log-softmax in fp32 of `logits` `[R, N, V]` at `tokens` `[R, N]`, with the `count` best."""
    logits = logits.float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    top, top_tokens = logits.topk(min(count, logits.shape[-1]))
    chosen = logits.gather(2, tokens[..., None])
    return PathLogprobs((chosen - normaliser)[..., 0], top_tokens, top - normaliser, 1 + (logits > chosen).sum(-1))
