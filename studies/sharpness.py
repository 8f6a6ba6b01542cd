"""What a CTC head's trees gain if its logits are multiplied before the search: its tokens are surer then.

    python -m studies.sharpness --output studies/results/sharpness

The trees are set at places of the base's own answers to held-out questions, greedy and drawn, for each factor at the
same places. The figure is the mean number of tokens that a step there would yield, and nothing in it depends on the
machine. A head learns what its target model finds likely at temperature 1, and what is decoded is surer than that; but
a head that has learned little is too sure as it is.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.heads import answers
from drafter.ctc.head import CTCHead, NativeSearch
from drafter.ctc.lattice import LATTICE_BEAM
from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS
from drafter.errors import LoadError
from drafter.evaluation.environment import environment
from drafter.evaluation.intervals import bootstrap
from drafter.evaluation.questions import QuestionError
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table, with_interval
from drafter.heads.checkpoint import load_head
from drafter.heads.frame_head import last_tokens
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from drafter.training.targets import RegeneratedText, accepted_depths, base_hidden_states, walked_batches

NODES = (3, 7, 15)
RECORD_FILE, TABLE_FILE = "sharpness.json", "sharpness.md"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {RECORD_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="the head's base (default: the embedded one)")
    parser.add_argument(
        "--drafter", type=Path, default=EMBEDDED_HEADS / "ctc", help="folder of a CTC head that knows labels"
    )
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[1.0, 1.5, 2.0], help="the first one is compared with"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--file", default="data/gsm8k/test.jsonl", help="held-out questions (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=12, help="how many of them (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument(
        "--every", type=int, default=2, help="places of an answer, each so many tokens (default: %(default)s)"
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    try:
        base = load_base(args.model, dtype=torch.float32, device="cpu")
        head, tokenizer = load_head(args.drafter, base), load_tokenizer(args.model)
        if not isinstance(head, CTCHead) or not head.config.label_context:
            raise LoadError(f"{args.drafter} is no CTC head whose frames know labels")
        rows: list[dict[str, Any]] = []
        for temperature in args.temperatures:
            texts = answers(base, tokenizer, args.questions, args.max_new_tokens, args.file, temperature)
            rows += measure(head, base, texts, args.factors, args.every, {"T": temperature})
    except (LoadError, QuestionError) as error:
        raise SystemExit(f"error: {error}") from error
    command = shlex.join(["python", "-m", "studies.sharpness", *given])
    record: dict[str, Any] = {"environment": environment(base, command), "rows": rows}
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / RECORD_FILE, record)
    where = f"`{record['environment']['command']}`, commit {record['environment']['commit']}."
    (args.output / TABLE_FILE).write_text(f"# Sharper drafts\n\n{where}\n\n{table(rows)}\n", encoding="utf-8")
    print(table(rows))


@torch.inference_mode()
def measure(
    head: CTCHead,
    base: BaseModel,
    texts: Sequence[RegeneratedText],
    factors: Sequence[float],
    every: int,
    where: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return a row for each factor: places of each text, and by number of nodes the accepted draft tokens there."""
    searches, most = {}, max(NODES) + 1
    for factor in factors:
        scaled = copy.deepcopy(head)
        scaled.load_state_dict(sharpened(head.state_dict(), factor))
        searches[factor] = NativeSearch(scaled, base, LATTICE_BEAM)
    places: list[int] = []
    accepted: dict[float, list[list[int]]] = {factor: [] for factor in factors}  # by text, then number of nodes
    for whole in walked_batches(texts, head.config.depth, at_once=4):
        hidden = base_hidden_states(base, whole.tokens, head.hidden_layers)
        batch = replace(
            whole,
            anchors=whole.anchors[:, ::every],
            targets=whole.targets[:, ::every],
            lengths=whole.lengths[:, ::every],
        )
        count = head.frames_for(most, "exact")
        states = head.module(base.embed(batch.tokens), hidden, batch.anchors, count).flatten(0, 1)
        recent = last_tokens(batch.tokens, batch.anchors, head.recent_tokens).flatten(0, 1)
        places += (batch.lengths > 0).sum(1).tolist()
        for factor, search in searches.items():
            trees = head.name_nodes(search(states, recent, most, 0.0))
            found = accepted_depths(trees, batch.targets.flatten(0, 1), batch.lengths.flatten(), NODES)
            accepted[factor] += found.view(len(NODES), *batch.anchors.shape).sum(2).T.tolist()
    return [where | {"factor": factor, "places": places, "accepted": accepted[factor]} for factor in factors]


def sharpened(tensors: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Return a head's tensors with its logits multiplied. The blank reads the same states: its weights are divided."""
    factors = {"norm.weight": factor, "norm.bias": factor, "blank.weight": 1 / factor}
    return {name: tensor * factors.get(name, 1) for name, tensor in tensors.items()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tokens of a step for each factor, and by how much they are more than with the first one."""
    first = {row["T"]: row for row in reversed(rows)}
    lines = []
    for row in rows:
        places = np.array(row["places"])
        ours, theirs = (places[:, None] + np.array(one["accepted"]) for one in (row, first[row["T"]]))
        line = {"T": f"{row['T']:g}", "factor": f"{row['factor']:g}", "places": int(places.sum())}
        for at, nodes in enumerate(NODES):
            line[f"tokens, {nodes} nodes"] = f"{ours[:, at].sum() / places.sum():.2f}"
            gain = partial(_ratio, ours[:, at], theirs[:, at])
            line[f"÷, {nodes} nodes"] = with_interval(gain(np.arange(len(places))), bootstrap(range(len(places)), gain))
        lines.append(line)
    return markdown_table(lines)


def _ratio(ours: NDArray[np.int64], theirs: NDArray[np.int64], texts: NDArray[np.int64]) -> float:
    return float(ours[texts].sum() / theirs[texts].sum())


if __name__ == "__main__":
    main()
