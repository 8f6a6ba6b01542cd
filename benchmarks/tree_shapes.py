"""The exact best trie against the published static tree with collapse, at equal numbers of nodes: which β?

    python -m benchmarks.tree_shapes

The same head, the same held-out GSM8K questions, greedy; every step verifies the same number of draft nodes. Only the
tree differs, so the figures do not depend on the machine's speed.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from benchmarks.harness import (
    decode_all,
    environment,
    held_out_prompts,
    load_base,
    make_parser,
    markdown_table,
    run,
    write_result,
)
from drafter.drafters.ctc import CTCDrafter, CTCHead
from drafter.embedded import EMBEDDED_HEADS
from drafter.engine import Engine, EngineConfig
from drafter.statistics import acceptance_by_depth, draft_acceptance_rate, mean_acceptance_length, total

TreeKind = Literal["exact", "static"]


def main() -> None:
    """Measure, write the record, print the table."""
    parser = make_parser(__doc__, prompts=100)
    parser.add_argument("--head", default=str(EMBEDDED_HEADS / "ctc"), help="folder or hub id of a CTC head")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64], help="draft nodes of a step")
    parser.add_argument("--slots", type=int, default=16)
    args = parser.parse_args()
    base, tokenizer = load_base(args)
    head = CTCHead.from_pretrained(args.head, base)
    if head.config.label_context:
        raise SystemExit(
            f"{args.head}: its frames depend on the last label (label_context {head.config.label_context}), and a "
            "static tree needs frames that do not: give --head a head of label_context 0"
        )
    prompts = held_out_prompts(tokenizer, 0, args.prompts)

    results: list[dict[str, Any]] = []
    outputs: list[list[list[int]]] = []
    for nodes in args.nodes:
        for tree in get_args(TreeKind):
            drafter = CTCDrafter(head, base, tree_size=nodes + 1, tree=tree)
            config = EngineConfig(slots=args.slots, nodes=nodes)
            _, generations = decode_all(Engine(base, drafter, tokenizer, config), prompts, args.max_new_tokens)
            outputs.append([generation.token_ids for generation in generations])
            counts = total(generation.counts for generation in generations)
            results.append(
                {
                    "nodes": nodes,
                    "tree": tree,
                    "beta": mean_acceptance_length(counts),
                    "draft_acceptance_rate": draft_acceptance_rate(counts),
                    "acceptance_by_depth": acceptance_by_depth(counts),
                    "counts": {key: value for key, value in vars(counts).items() if key != "per_step_accepted"},
                    "same_tokens_as_first": outputs[-1] == outputs[0],
                }
            )
            print(f"{nodes:3d} nodes  {tree:7s} β {results[-1]['beta']:.3f}", flush=True)

    settings = {key: value for key, value in vars(args).items() if key not in ("model", "head", "output")}
    training = head.provenance.training if head.provenance is not None else {}
    record = {
        "benchmark": "tree_shapes",
        "environment": environment(base),
        "settings": settings,
        "head": {"config": vars(head.config), "training": dict(training)},
        "results": results,
    }
    beta = {(result["nodes"], result["tree"]): result["beta"] for result in results}
    print(
        "\n"
        + markdown_table(
            [
                {
                    "draft nodes": nodes,
                    "β, static tree + collapse": f"{beta[nodes, 'static']:.2f}",
                    "β, exact trie": f"{beta[nodes, 'exact']:.2f}",
                    "exact ÷ static": f"{beta[nodes, 'exact'] / beta[nodes, 'static']:.3f}",
                }
                for nodes in args.nodes
            ]
        )
    )
    write_result("tree-shapes", args.output, record)


if __name__ == "__main__":
    run(main)
