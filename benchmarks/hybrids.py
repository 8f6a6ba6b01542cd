"""A model with recurrent layers beside one with softmax attention: plain decoding, and draft trees.

    python -m benchmarks.hybrids drafter/embedded/hybrid drafter/embedded/base \
        --heads drafter/embedded/other_heads/hybrid drafter/embedded/heads/ctc --output benchmarks/results/hybrids

Plain decoding is timed in turns. Of each model: the speed with its head relative to plain decoding, what its cache
takes, and how long a forward over random draft trees takes, at once and with paths as rows. In the latter, which any
model can do, the model's own code runs each path to a leaf as a text of its own, behind a copy of the row's cache.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache

from benchmarks.never_slower import DATA
from drafter.devices import synchronise
from drafter.drafters.contract import PlainDecoding
from drafter.engine.engine import Engine
from drafter.evaluation.decoders import decode_all, room_for
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.measurement import Evaluation, Progress
from drafter.evaluation.questions import read_questions
from drafter.evaluation.results import PLAIN, RESULTS_FILE, Plan, Results, figures, write_json
from drafter.evaluation.tables import markdown_table
from drafter.requests import Request, SamplingParams
from drafter.target_model.cache import CacheBytes, TargetCache
from drafter.target_model.kv_cache import cache_name
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import TreeNodes
from drafter.text.tokenizers import load_tokenizer
from drafter.tree.token_tree import TokenTree

COSTS_FILE, RATES_FILE, TABLE_FILE = "costs.json", "rates.json", "hybrids.md"
BATCHES, NODES = (1, 4, 16), (7,)
ROWS = (1, 16, 64, 256)  # of plain decoding
_PROMPT, _NEW, _FEWEST, _RATES = 32, 32, 4, 3  # tokens, the least number of requests, turns
_CONTEXT, _WARM_UP, _TURNS = 256, 1, 5
_LONG = 512  # tokens of a row whose memory the page has
_QUESTIONS = "gsm8k/test.jsonl"


@dataclass(frozen=True)
class Rate:
    """Tokens per second of plain decoding, prompts included: the median of some turns."""

    model: str
    rows: int
    rate: float
    cpu_rate: float  # tokens per second of a processor


@dataclass(frozen=True)
class Cost:
    """Median seconds of one step's forward over random trees."""

    rows: int
    nodes: int  # draft tokens of each row
    paths: int  # leaves of all trees
    depth: int  # of the deepest node
    plain: float  # a token of each row
    at_once: float  # all nodes of all trees, and the commit of the deepest path
    as_rows: float  # the same paths as rows, without a commit


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the records of each model and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="folders of models")
    parser.add_argument(
        "--heads", nargs="+", type=Path, default=[], help="a head of each model; without them only costs are measured"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    if len(args.heads) not in (0, len(args.models)):
        parser.error("there must be a head for each model, or none")
    command = shlex.join(["python", "-m", "benchmarks.hybrids", *given])
    bases = {folder: load_base(folder) for folder in args.models}
    rates = [asdict(rate) for rows in ROWS for rate in measure_rates(bases, rows)]
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / RATES_FILE, {"load": os.getloadavg()[0], "rates": rates})
    for number, folder in enumerate(args.models):
        base, output = bases[folder], args.output / folder.name
        output.mkdir(parents=True, exist_ok=True)
        if args.heads:
            measure_speed(base, folder, args.heads[number], args, command).save(output)
        costs = [asdict(measure(base, rows, nodes)) for rows in BATCHES for nodes in NODES]
        record = {"environment": environment(base, command), "cache": asdict(base.cache_bytes), "costs": costs}
        write_json(output / COSTS_FILE, record)
    print(write_page(args.output, [folder.name for folder in args.models]))


def measure_rates(bases: Mapping[Path, BaseModel], rows: int) -> list[Rate]:
    """Decode plainly by the model of each folder in turns, so many rows at a time."""
    requests = [
        Request(prompt, SamplingParams(_NEW, ignore_eos=True))
        for prompt in torch.randint(
            5, 2_000, (max(rows, _FEWEST), _PROMPT), generator=torch.Generator().manual_seed(0)
        ).tolist()
    ]
    config = room_for(requests, rows)
    engines = {
        folder.name: Engine(base, PlainDecoding(), load_tokenizer(folder), config) for folder, base in bases.items()
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for turn in range(_WARM_UP + _RATES):
        for name, engine in engines.items():
            cpu_start = time.process_time()
            run = decode_all(engine, requests)
            if turn >= _WARM_UP:
                found[name].append((run.seconds, time.process_time() - cpu_start))
    count = len(requests) * _NEW
    return [
        Rate(name, rows, *(count / median(seconds) for seconds in zip(*taken, strict=True)))
        for name, taken in found.items()
    ]


def measure_speed(base: BaseModel, folder: Path, head: Path, args: argparse.Namespace, command: str) -> Results:
    """Measure a model with its head beside plain decoding, greedy, on held-out questions."""
    plan = Plan(
        (str(head),),
        ("exact",),
        tuple(args.draft_tokens),
        tuple(batch for batch in BATCHES if batch <= args.prompts),
        rounds=args.rounds,
        max_new_tokens=args.max_new_tokens,
    )
    questions = {"gsm8k": read_questions(DATA / _QUESTIONS, args.prompts)}
    evaluation = Evaluation(base, load_tokenizer(folder), questions, plan)
    results = evaluation.describe(command, {"gsm8k": f"data/{_QUESTIONS}"})
    for cells in evaluation.run():
        if not isinstance(cells, Progress):
            results.cells.extend(cells)
            print(f"{folder.name}: {cells[0].setting}", file=sys.stderr)
    return results


def random_trees(rows: int, nodes: int, vocab_size: int) -> TokenTree:
    """Return trees in which any earlier node is equally probable to be a node's parent."""
    random = torch.Generator().manual_seed(rows * 1_000 + nodes)
    parents = torch.zeros(rows, nodes + 1, dtype=torch.long)
    depths = torch.zeros_like(parents)
    for node in range(1, nodes + 1):
        parents[:, node] = torch.randint(0, node, (rows,), generator=random)
        depths[:, node] = depths.gather(1, parents[:, node, None])[:, 0] + 1
    tokens = torch.randint(0, vocab_size, (rows, nodes + 1), generator=random)
    return TokenTree(tokens, parents, depths, torch.zeros(rows, nodes + 1))


@torch.inference_mode()
def measure(base: BaseModel, rows: int, nodes: int) -> Cost:
    """Time one step's forward over random trees of `nodes` draft tokens behind random texts."""
    tree = random_trees(rows, nodes, base.vocab_size)
    texts = torch.randint(0, base.vocab_size, (rows, _CONTEXT), generator=torch.Generator().manual_seed(rows))
    texts = texts.to(base.device)
    cache, own = read(base, texts, nodes)
    lengths = torch.full((rows,), _CONTEXT, device=base.device)
    deepest = [path_to(tree, row, int(tree.depths[row].argmax())) for row in range(rows)]
    path = pad_sequence(deepest, batch_first=True).to(base.device)
    (tokens, row_of_path), root = paths_of(tree), tree.leading(1)

    def at_once(some: TokenTree, accepted: Tensor) -> None:
        base.verify(cache, nodes_of(some, lengths))
        cache.commit(lengths, accepted, slice(0, rows))

    plain, whole, by_path = _seconds(
        base.device,
        lambda: at_once(root, path[:, :1]),
        lambda: at_once(tree, path),
        lambda: paths_as_rows(base, own, tokens, row_of_path),
    )
    return Cost(rows, nodes, len(tokens), int(tree.depths.max()), plain, whole, by_path)


def read(base: BaseModel, texts: Tensor, nodes: int) -> tuple[TargetCache, Cache]:
    """Read texts `[B, C]` into a cache with room for `nodes` draft tokens, and into one of transformers' own."""
    rows, length = texts.shape
    cache = base.new_cache(rows, length + nodes + 2)
    for row, text in enumerate(texts):
        base.prefill(cache, row, [text])
    name = cache_name(base.model)
    own = base.model(texts, **{name: DynamicCache(config=base.config)}, use_cache=True)[name]
    return cache, own


def nodes_of(tree: TokenTree, lengths: Tensor) -> TreeNodes:
    """Return a forward over trees behind texts of equal `lengths` `[B]`."""
    tree = TokenTree(*(part.to(lengths.device) for part in vars(tree).values()))
    return TreeNodes(
        tokens=tree.tokens,
        lengths=lengths,
        positions=lengths[:, None] + tree.depths,
        kv_length=int(lengths.max()) + tree.size,
        parents=tree.parents,
        ancestors=tree.ancestors(),
    )


def paths_as_rows(base: BaseModel, own: Cache, paths: Tensor, rows: Tensor) -> Tensor:
    """Run paths `[P, D]` behind the texts of their `rows` `[P]`, by the model's own code; return logits `[P, D, V]`."""
    copies = copy.deepcopy(own)
    copies.reorder_cache(rows.to(base.device))
    logits: Tensor = base.model(paths.to(base.device), **{cache_name(base.model): copies}, use_cache=True).logits
    return logits


def paths_of(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """Return the tokens of all paths to leaves `[P, D]`, padded with any token behind their ends, and their rows."""
    paths, rows = [], []
    for row, parents in enumerate(tree.parents.tolist()):
        for leaf in sorted(set(range(tree.size)) - set(parents)):
            paths.append(tree.tokens[row, path_to(tree, row, leaf)])
            rows.append(row)
    return pad_sequence(paths, batch_first=True), torch.tensor(rows)


def path_to(tree: TokenTree, row: int, node: int) -> Tensor:
    """Return the nodes from a row's root to a node."""
    path = [node]
    while path[-1]:
        path.append(int(tree.parents[row, path[-1]]))
    return torch.tensor(path[::-1])


def _seconds(device: torch.device, *works: Callable[[], object]) -> list[float]:
    """Return the median seconds of each, taken in turns: a machine is not equally fast at all times."""
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(_WARM_UP + _TURNS):
        for work, taken in zip(works, seconds, strict=True):
            synchronise(device)
            start = time.perf_counter()
            work()
            synchronise(device)
            if turn >= _WARM_UP:
                taken.append(time.perf_counter() - start)
    return list(map(median, seconds))


def write_page(folder: Path, names: Sequence[str]) -> str:
    """Write the page of the records of these models in `folder`; return it."""
    records = {name: json.loads((folder / name / COSTS_FILE).read_text(encoding="utf-8")) for name in names}
    speeds = [row for name in names if (folder / name / RESULTS_FILE).exists() for row in _speeds(folder, name)]
    memory = [{"model": name} | _memory(CacheBytes(**record["cache"])) for name, record in records.items()]
    costs = [{"model": name} | _cost(Cost(**cost)) for name, record in records.items() for cost in record["costs"]]
    where = next(iter(records.values()))["environment"]
    measured = json.loads((folder / RATES_FILE).read_text(encoding="utf-8"))
    parts = [
        "# A hybrid beside softmax attention",
        f"{machine(where)}, {where['threads']} threads, load {measured['load']:.1f}, {where['dtype']}. "
        f"`{where['command']}`, commit {where['commit']}, {where['date']}.",
        "## Plain decoding",
        f"Prompts of {_PROMPT} random tokens, {_NEW} new ones each, in turns. ÷: of the first model's rate by the "
        "last one's, by the clock and by seconds of a processor.",
        markdown_table(_ratios([Rate(**rate) for rate in measured["rates"]])),
    ]
    if speeds:
        parts += [
            "## Speed",
            "Greedy, on questions of GSM8K's test split. β: new tokens per "
            "forward. γ: speed relative to plain decoding in the same engine and run.",
            markdown_table(speeds),
        ]
    parts += [
        "## Memory",
        "Of the cache: of each position of a row, of a row however long, and of a node of a step until its commit.",
        markdown_table(memory),
        "## One step's forward",
        f"Behind {_CONTEXT} tokens, over random trees. At once: all nodes, with the commit of the deepest path. A step "
        "gains where its new tokens are more than its cost in those of plain steps, `÷ a token`. Paths as rows: the "
        "model's own code over each path from root to leaf, behind a copy of the row's cache, with no commit, which "
        "would take one more forward.",
        markdown_table(costs),
    ]
    page = "\n\n".join(parts)
    (folder / TABLE_FILE).write_text(page + "\n", encoding="utf-8")
    return page


def _ratios(rates: Sequence[Rate]) -> list[dict[str, object]]:
    rows = []
    for number in sorted({one.rows for one in rates}):
        some = [one for one in rates if one.rows == number]
        row: dict[str, object] = {"rows": number}
        row |= {f"{one.model}, tokens/s": f"{one.rate:.0f}" for one in some}
        row["÷"] = f"{some[0].rate / some[-1].rate:.2f}"
        row |= {f"{one.model}, tokens/s of a processor": f"{one.cpu_rate:.0f}" for one in some}
        row["÷ of a processor"] = f"{some[0].cpu_rate / some[-1].cpu_rate:.2f}"
        rows.append(row)
    return rows


def _speeds(folder: Path, name: str) -> list[dict[str, object]]:
    found = figures(Results.load(folder / name).cells)
    plain = {one.cell.batch: one.rate for one in found if one.cell.arm == PLAIN}
    return [
        {
            "model": name,
            "batch": one.cell.batch,
            "draft tokens": one.cell.arm.nodes,
            "β": f"{one.beta:.2f}",
            "tokens/s, plain": f"{plain[one.cell.batch]:.0f}",
            "with the head": f"{one.rate:.0f}",
            "γ": f"{one.gamma:.2f}",
            "differing tokens": one.cell.differing_tokens,
        }
        for one in found
        if one.cell.arm != PLAIN
    ]


def _memory(cache: CacheBytes) -> dict[str, object]:
    sizes: dict[str, object] = {f"bytes a {what}": f"{size:,}" for what, size in asdict(cache).items()}
    row = cache.slot + _LONG * cache.position
    return sizes | {f"MiB of a row of {_LONG} tokens": f"{row / 2**20:.2f}"}


def _cost(cost: Cost) -> dict[str, object]:
    return {
        "rows": cost.rows,
        "draft tokens": cost.nodes,
        "paths": cost.paths,
        "depth": cost.depth,
        "a token, ms": f"{1e3 * cost.plain:.1f}",
        "tree at once, ms": f"{1e3 * cost.at_once:.1f}",
        "÷ a token": f"{cost.at_once / cost.plain:.2f}",
        "paths as rows, ms": f"{1e3 * cost.as_rows:.1f}",
        "rows ÷ at once": f"{cost.as_rows / cost.at_once:.1f}",
    }


if __name__ == "__main__":
    main()
