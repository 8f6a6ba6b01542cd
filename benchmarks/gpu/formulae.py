"""What a decoding step reads and runs, by formula: bytes and kernels, kernel by kernel as PyTorch dispatches them.

`docs/gpu.md` has the formulae. `tests/benchmarks/gpu` holds them to what is counted on tensors without numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from drafter.acceptance.sampling import INTERVALS, PASSES
from recipes.paper.base_sizes import BaseSizes


@dataclass(frozen=True)
class DraftWork:
    """What drafting reads and runs, beside what the base does.

    Args:
        weights: Bytes of the head's own weights that a step reads, all passes together.
        lm_head_passes: How often it reads the base's LM head.
        context: Bytes of its own cache of a position.
        states: Distributions over the vocabulary that it computes for a row.
        bytes_per_score: Bytes that are read of a token's score in one of them, from logit to tree.
        kernels: Number of kernels.
    """

    weights: int = 0
    lm_head_passes: int = 0
    context: int = 0
    states: int = 0
    bytes_per_score: float = 0.0
    kernels: int = 0


NO_DRAFT = DraftWork()


def ngram(depth: int) -> DraftWork:
    """Prompt lookup: no weights, and of the text too little to count."""
    return DraftWork(kernels=82 + 15 * depth)


def ctc_prefix(weights: int, context: int, frames: int, depth: int) -> DraftWork:
    """Independent frames: one pass, and the exact prefix search over all of them."""
    return DraftWork(weights, 1, context, frames, 29.5, 131 + 12 * depth)


def ctc_lattice(weights: int, context: int, band: int, beam: int, depth: int, factor: int) -> DraftWork:
    """Frames that know the last labels: one pass for all of them, and the search over the best prefixes of each depth.

    A depth reads what the LM head makes of the joint network (`factor` bytes), and scores all tokens in each frame of
    the band.
    """
    states = band * (1 + (depth - 1) * beam)
    return DraftWork(weights + depth * factor, 1, context, states, 10.0, 90 + 62 * depth)


def medusa(weights: int, depth: int) -> DraftWork:
    """An output layer of its own for each depth."""
    return DraftWork(weights, 0, 0, depth, 10.0, 40 + 10 * depth)


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a greedy step reads, by what they are of.

    Args:
        weights: The base's matrices, once.
        kv: Keys and values of all positions that are read, each once whatever the number of query heads.
        masks: A number for each query head of a group and two nodes of a tree, in every layer.
        activations: What goes from kernel to kernel.
        logits: The largest is looked for twice: the choice, and whether all are numbers.
        commit: Keys and values of the accepted path, read to be moved, twice.
        draft: See `DraftWork`.
    """

    weights: int
    kv: int
    masks: int
    activations: int
    logits: int
    commit: int
    draft: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(vars(self).values())


def step_bytes(sizes: BaseSizes, rows: int, nodes: int, kv_length: int, depth: int, draft: DraftWork) -> StepBytes:
    """Bytes that a greedy step reads.

    Args:
        sizes: Of the base.
        rows: B.
        nodes: N, tree nodes of each row, the root included.
        kv_length: S, cache positions that are read of each row.
        depth: D, levels of a tree.
        draft: What drafting reads.
    """
    item, tokens = sizes.itemsize, rows * nodes
    # Numbers that the kernels of a layer read of a token: of its state, inside the MLP, of queries, of keys and values.
    # A tree's queries are laid out anew, and what attention has mixed of committed positions and of the tree is merged.
    queries = 7.5 if nodes == 1 else 22.5
    numbers = 29 * sizes.hidden + 4 * sizes.intermediate + queries * sizes.queries + 7.5 * sizes.keys
    return StepBytes(
        weights=sizes.weights,
        kv=rows * kv_length * sizes.kv_per_position,
        masks=sizes.layers * tokens * nodes * (sizes.queries // sizes.keys) * item,
        activations=round(sizes.layers * tokens * numbers * item),
        logits=2 * tokens * sizes.vocabulary * item,
        commit=0 if nodes == 1 else 2 * rows * (depth + 1) * sizes.kv_per_position,
        draft=round(
            draft.weights
            + draft.lm_head_passes * sizes.vocabulary * sizes.hidden * item
            + rows * kv_length * draft.context
            + rows * draft.states * sizes.vocabulary * draft.bytes_per_score
        ),
    )


def sampling_bytes(sizes: BaseSizes, rows: int, depth: int) -> dict[str, int]:
    """Bytes that a step of rows that sample reads beside those of a greedy one, by what reads them.

    A token is chosen at each level of a tree, whether the row's way goes so far or not. Top-k and top-p read all scores
    once in each pass of their search, which four operations make, and then its intervals.
    """
    choices = rows * (depth + 1)
    search = 4 * 8 * PASSES * sizes.vocabulary + 25 * INTERVALS
    return {
        "draw": choices * 183 * sizes.vocabulary,
        "top-k": choices * (25 * sizes.vocabulary + search),
        "top-p": choices * (57 * sizes.vocabulary + 8 * PASSES * sizes.vocabulary + search),
        "min-p": choices * 17 * sizes.vocabulary,
    }


def step_kernels(sizes: BaseSizes, nodes: int, draft: DraftWork, *, parts: bool = False) -> int:
    """Number of kernels of a greedy step: of the layers, of the rest of the step, and of drafting.

    Args:
        sizes: Of the base.
        nodes: N, tree nodes of each row, the root included.
        draft: What drafting runs.
        parts: Whether a row's committed positions are shared out to several parts; see `prefix_attention.parts_of`.
    """
    if nodes == 1:
        return 40 * sizes.layers + 66
    return (64 if parts else 52) * sizes.layers + 103 + draft.kernels
