"""Operator parity: what each algorithm makes on the device, beside what it makes on the CPU of the same numbers.

Without a GPU the CPU is compared with itself, going the way that it goes where the host may not look at numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.cells import Key, Measure, Plan, Stage, Values
from drafter import devices
from drafter.acceptance.choices import NodeChoices, RowSampling, SamplingMode, SamplingTable
from drafter.acceptance.contract import descend, walk
from drafter.acceptance.sampling import draw, keep_probable, keep_ranked
from drafter.ctc.prefix_search import best_trie, static_tree
from drafter.drafters.prompt_lookup import lookup
from drafter.requests import SamplingParams
from drafter.target_model.attention import additive, folded, tree_attention, tree_attention_mask
from drafter.target_model.cache import BLOCK, Blocks, GrowingBlocks, TargetCache
from drafter.target_model.kv_cache import KVCache, LayerShape
from drafter.target_model.loading import pick_device
from drafter.target_model.nodes import PromptNodes
from drafter.tree.token_tree import TokenTree, best_product_trie, from_paths, merge, root_only

Inputs = dict[str, Tensor]
_DEPTH, _NODES, _FRAMES = 6, 16, 8
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {},
)


def _trees(rows: int, vocabulary: int, random: torch.Generator) -> TokenTree:
    paths = torch.randint(0, min(vocabulary, 7), (rows, 12, _DEPTH), generator=random)
    prices = torch.rand(rows, 12, _DEPTH, generator=random).cumsum(-1).neg()
    return from_paths(torch.arange(rows) % vocabulary, paths, prices, _NODES)


def _inputs(rows: int, vocabulary: int) -> Inputs:
    """Random numbers for all operators, made on the CPU."""
    random = torch.Generator().manual_seed(0)
    tree = _trees(rows, vocabulary, random)
    scores = torch.randn(rows, vocabulary, generator=random, dtype=torch.float64) * 4
    return {
        "tokens": tree.tokens,
        "parents": tree.parents,
        "depths": tree.depths,
        "log_probs": tree.log_probs,
        "pending": tree.tokens[:, 0].contiguous(),
        "frames": (torch.randn(rows, _FRAMES, vocabulary + 1, generator=random) * 3).log_softmax(-1),
        "scores": scores - scores.amax(-1, keepdim=True),
        "choices": torch.randint(0, min(vocabulary, 7), (rows, _NODES), generator=random),
        "lengths": torch.randint(20, 90, (rows,), generator=random),
        "text": torch.randint(0, 5, (rows, 128), generator=random),
        "keys": torch.randint(-(1 << 62), 1 << 62, (rows,), generator=random),
        "queries": torch.randn(rows, 8, _NODES, 64, generator=random),
        "states": torch.randn(rows, 2, 2, 128, 64, generator=random),
        "top_k": torch.randint(0, 50, (rows,), generator=random),
        "top_p": torch.rand(rows, generator=random, dtype=torch.float64).clamp_min(0.1),
    }


def _tree(given: Inputs) -> TokenTree:
    return TokenTree(given["tokens"], given["parents"], given["depths"], given["log_probs"])


def _positions(given: Inputs) -> Tensor:
    return given["lengths"][:, None] + given["depths"]


def _attention(given: Inputs) -> Tensor:
    tree, groups = _tree(given), 4
    mask = additive(tree_attention_mask(given["lengths"], _positions(given), tree.ancestors(), 128), torch.float32)
    keys, values = given["states"].unbind(1)
    module = torch.nn.Module()
    return tree_attention(module, given["queries"], keys, values, folded(mask, groups))[0]


def _cache(given: Inputs, paged: bool) -> list[Tensor]:
    """Write a tree's keys and values behind the rows, move the accepted ones, clear what is behind, and read them."""
    rows, device = len(given["tokens"]), given["tokens"].device
    shape = LayerShape(2, 64, 64, torch.float32, device)
    length = 4 * BLOCK
    blocks = GrowingBlocks(rows, length, device, rows * length // BLOCK) if paged else Blocks(rows, length, device)
    cache = TargetCache(blocks, [KVCache([shape], blocks)], 1)
    for row in range(rows):
        blocks.reserve(row, length)

    def seen(count: int) -> Any:
        positions = given["lengths"][:, None] + torch.arange(count, device=device)
        nodes = PromptNodes(tokens=positions, lengths=given["lengths"], positions=positions, kv_length=length)
        return cache.view(nodes).layers[0]

    layer = seen(_NODES)
    keys, values = (one[:, :, :_NODES] for one in given["states"].unbind(1))
    layer.update(keys, values)
    path, _, count = _walked(given)
    cache.commit(given["lengths"], path, slice(0, rows))
    cache.scrub(given["lengths"] + _DEPTH + 1, _NODES, given["lengths"] % 2 == 0, slice(0, rows))
    read = seen(1).update(keys[:, :, :1], values[:, :, :1])
    kept = torch.arange(length, device=device) <= (given["lengths"] + count)[:, None]  # what is behind is nobody's
    return [torch.where(kept[:, None, :, None], part, 0) for part in read]


def _walked(given: Inputs) -> list[Tensor]:
    tree = _tree(given)
    found = walk(tree, given["choices"], tree.ancestors(_DEPTH), _DEPTH)
    return [found.path, found.tokens, found.count]


def _descended(given: Inputs) -> list[Tensor]:
    """The path and the number of accepted tokens; what is chosen past the end is nobody's."""
    found = descend(_tree(given), lambda rows, nodes: given["choices"][rows, nodes], _DEPTH)
    level = torch.arange(_DEPTH + 1, device=found.path.device) <= found.count[:, None]
    return [found.path * level, found.tokens * level, found.count]


def _chosen(given: Inputs) -> Tensor:
    """What rows choose after their root, all of another kind of sampling, by kernels where the device has them."""
    tree, rows, device = root_only(given["pending"]), len(given["pending"]), given["pending"].device
    some = [SamplingParams(seed=row, **_KINDS[row % len(_KINDS)]) for row in range(rows)]
    table = SamplingTable.empty(rows, device)
    for slot, one in enumerate(some):
        table.set(slot, one, 20)
    sampling = RowSampling(table, slice(0, rows), SamplingMode.of(some), given["text"], given["lengths"])
    ids = torch.arange(rows, device=device)
    choices = NodeChoices(given["scores"].float()[:, None], tree, tree.ancestors(), sampling)
    return choices.at(ids, torch.zeros_like(ids))


def _fields(tree: TokenTree) -> list[Tensor]:
    return list(vars(tree).values())


OPERATORS: dict[str, Callable[[Inputs], Any]] = {
    "ancestors": lambda x: _tree(x).ancestors(_DEPTH),
    "tree mask": lambda x: tree_attention_mask(x["lengths"], _positions(x), _tree(x).ancestors(), 128),
    "tree mask, window": lambda x: tree_attention_mask(
        x["lengths"], _positions(x), _tree(x).ancestors(), 128, window=9
    ),
    "tree attention": _attention,
    "merge": lambda x: _fields(merge([_tree(x), _tree(x).leading(9)], _DEPTH, _NODES)),
    "CTC prefix search": lambda x: _fields(best_trie(x["frames"], x["pending"], _DEPTH, _NODES, 64)),
    "product search": lambda x: _fields(best_product_trie(x["frames"], x["pending"], _NODES)),
    "static tree": lambda x: _fields(static_tree(x["frames"], x["pending"], _DEPTH, _NODES)),
    "n-gram lookup": lambda x: lookup(x["text"], x["lengths"], 8, 4),
    "walk": _walked,
    "descend": _descended,
    "top-k and top-p": lambda x: keep_ranked(x["scores"], x["top_k"], x["top_p"]),
    "min-p": lambda x: keep_probable(x["scores"], x["top_p"] / 10),
    "keyed draw": lambda x: draw(x["scores"].clone(), x["keys"], x["lengths"]),
    "choice": _chosen,
    "KV cache": lambda x: _cache(x, paged=False),
    "paged KV cache": lambda x: _cache(x, paged=True),
    "argmax": lambda x: x["scores"].float().argmax(-1),
    "log-softmax": lambda x: F.log_softmax(x["scores"].float(), -1),
}
"""What is compared, of inputs on any device."""


def cells(plan: Plan) -> list[Key]:
    """Every operator in sizes of a small model and of a large one."""
    sizes = [(3, 97)] if plan.tiny else [(1, 128_256), (3, 97), (16, 49_152)]
    return [
        {"operator": name, "rows": rows, "vocabulary": vocabulary} for name in OPERATORS for rows, vocabulary in sizes
    ]


def prepare(plan: Plan) -> Measure:
    """See `Stage`."""
    return lambda cell: compare(cell["operator"], cell["rows"], cell["vocabulary"], pick_device())


@torch.inference_mode()
def compare(name: str, rows: int, vocabulary: int, device: torch.device) -> Values:
    """Compare an operator's results on the CPU and on a device: integers, and how far numbers are apart."""
    given = _inputs(rows, vocabulary)
    expected = _parts(OPERATORS[name]({key: value.clone() for key, value in given.items()}))
    with as_on_a_gpu():
        found = _parts(OPERATORS[name]({key: value.clone().to(device) for key, value in given.items()}))
    differing, furthest = 0, 0.0
    for ours, theirs in zip((part.cpu() for part in found), expected, strict=True):
        if theirs.is_floating_point():
            same = ours == theirs  # infinite ones, too
            furthest = max(furthest, float(torch.where(same, 0, (ours - theirs).abs()).nan_to_num(math.inf).max()))
        else:
            differing += int((ours != theirs).sum())
    return {"integers that differ": differing, "largest difference": furthest}


def _parts(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """For a `with` block, the host does not look at numbers, on whatever device."""
    with mock.patch.object(devices, "is_asynchronous", return_value=True):
        yield


def row(cell: Key, values: Values) -> dict[str, object]:
    """A row of the table."""
    return {**cell, **values, "largest difference": f"{values['largest difference']:.1e}"}


STAGE = Stage("operators", "What each algorithm makes on the device, beside the CPU.", cells, prepare, row)
