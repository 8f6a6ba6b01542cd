"""β of every draft head in a folder, with every tree, at equal numbers of draft nodes.

    python -m benchmarks.heads build/heads --output benchmarks/results/heads

The trees of each head are walked along the base's own answers to held-out questions, GSM8K's unless others are named.
Decoding takes the same walks, also when it samples, because a token follows from its seed and not from what was
drafted. So the figures are decoding's and do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafter.embedded import EMBEDDED_BASE
from drafter.errors import LoadError
from drafter.evaluation.environment import environment
from drafter.evaluation.measurement import head_record
from drafter.evaluation.questions import QuestionError, prompts_of, read_questions
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.heads.checkpoint import load_head
from drafter.heads.config import CONFIG_FILE
from drafter.heads.contract import DraftHead
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from drafter.training.targets import RegeneratedText, simulated_beta

NODES = (8, 16, 32, 64)
HEADS_FILE = "heads.json"
TABLE_FILE = "heads.md"
_ROOT = Path(__file__).resolve().parents[1]
_QUESTIONS = _ROOT / "data" / "gsm8k" / "test.jsonl"
_SLOTS = 32


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, help="folder with a draft head's folder for each arm")
    parser.add_argument("--output", type=Path, required=True, help="folder for heads.json and heads.md")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="their base (default: the embedded one)")
    parser.add_argument(
        "--file", default=str(_QUESTIONS), help="file of held-out questions (default: GSM8K's test split)"
    )
    parser.add_argument("--questions", type=int, default=200, help="how many of them (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args(arguments)
    try:
        base = load_base(args.model)
        heads = read_heads(args.heads, base)
        texts = answers(
            base, load_tokenizer(args.model), args.questions, args.max_new_tokens, args.file, args.temperature
        )
    except (LoadError, QuestionError) as error:
        raise SystemExit(f"error: {error}") from error
    given = sys.argv[1:] if arguments is None else arguments
    record: dict[str, Any] = {
        "environment": environment(base, shlex.join(["python", "-m", "benchmarks.heads", *given])),
        "asked": {"file": os.path.relpath(args.file, _ROOT), "temperature": args.temperature},
        "questions": len(texts),
        "answer_tokens": sum(len(text.anchors) for text in texts),
        "heads": {},
    }
    args.output.mkdir(parents=True, exist_ok=True)
    for name, head in heads.items():
        record["heads"][name] = measure(head, base, texts)
        print(f"{name}: {record['heads'][name]['beta']}", flush=True)
        write_json(args.output / HEADS_FILE, record)
    print("\n" + write_table(args.output))


def read_heads(folder: Path, base: BaseModel) -> dict[str, DraftHead]:
    """Load the heads in `folder`, by name. Each is a head's folder, or an output of `drafter train` with `head/`.

    Raises `LoadError` if there is no head, or a head belongs to another base.
    """
    found = {file.parent.name: file.parent for file in folder.glob(f"*/{CONFIG_FILE}")}
    found |= {file.parents[1].name: file.parent for file in folder.glob(f"*/head/{CONFIG_FILE}")}
    if not found:
        raise LoadError(f"{folder} has no draft heads: give a folder that holds a head's folder for each arm")
    return {name: load_head(found[name], base) for name in sorted(found)}


def answers(
    base: BaseModel,
    tokenizer: Any,
    count: int,
    max_new_tokens: int,
    file: str | Path = _QUESTIONS,
    temperature: float = 0.0,
) -> list[RegeneratedText]:
    """Return the base's answers to held-out questions, all turns of each, or raise `QuestionError`."""
    settings: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    prompts = prompts_of(base, tokenizer, read_questions(file, count), slots=min(_SLOTS, count), **settings)
    ids = [list(prompt.request.prompt_ids) for prompt in prompts]
    return [RegeneratedText(one + prompt.answer, len(one)) for one, prompt in zip(ids, prompts, strict=True)]


def measure(head: DraftHead, base: BaseModel, texts: Sequence[RegeneratedText]) -> dict[str, Any]:
    """Return a head's β by tree and number of nodes, and its description. A tree that it does not have is left out."""
    beta: dict[str, dict[str, float]] = {}
    for tree in ("exact", "static"):
        try:
            found = simulated_beta(head, base, texts, NODES, tree=tree)
        except ValueError:
            if tree == "exact":
                raise
            continue
        beta[tree] = {str(nodes): round(value, 4) for nodes, value in found.items()}
    return head_record(head) | {"beta": beta}


def write_table(folder: Path) -> str:
    """Write `heads.md` from `heads.json` in `folder`. Return the tables."""
    record = json.loads((folder / HEADS_FILE).read_text(encoding="utf-8"))
    tables = beta_table(record["heads"])
    if {"ctc"} < {head["algorithm"] for head in record["heads"].values()}:
        tables += f"\n\n{ratio_table(record['heads'])}"
    # The oldest records do not say it: GSM8K was all that there was.
    asked = record.get("asked", {"file": "data/gsm8k/test.jsonl", "temperature": 0.0})
    page = (
        f"# Draft heads\n\nβ on {record['questions']} answers to held-out questions of `{asked['file']}` "
        f"({record['answer_tokens']:,} tokens), at temperature {asked['temperature']:g} and equal numbers of draft "
        f"nodes. `{record['environment']['command']}`, commit {record['environment']['commit']}.\n\n{tables}\n"
    )
    (folder / TABLE_FILE).write_text(page, encoding="utf-8")
    return tables


def beta_table(heads: dict[str, dict[str, Any]]) -> str:
    """Return β of every head and tree, sorted by β at the largest number of nodes."""
    nodes = node_counts(heads)
    arms = [(name, tree, betas) for name, head in heads.items() for tree, betas in head["beta"].items()]
    arms.sort(key=lambda arm: float(arm[2][nodes[-1]]), reverse=True)
    return markdown_table(
        [
            {"head": name, "algorithm": heads[name]["algorithm"], "parameters": f"{heads[name]['parameters']:,}"}
            | {"tree": tree}
            | {f"β, {count} nodes": f"{betas[count]:.2f}" for count in nodes}
            for name, tree, betas in arms
        ]
    )


def ratio_table(heads: dict[str, dict[str, Any]]) -> str:
    """Return β of every CTC head relative to each other head, with exact trees, by number of nodes."""
    nodes = node_counts(heads)
    betas = {name: head["beta"]["exact"] for name, head in heads.items()}
    ours = [name for name, head in heads.items() if head["algorithm"] == "ctc"]
    others = [name for name in heads if ours != [name]]
    return markdown_table(
        [
            {f"÷, at {' / '.join(nodes)} nodes": name}
            | {
                other: "" if other == name else " / ".join(f"{betas[name][n] / betas[other][n]:.2f}" for n in nodes)
                for other in others
            }
            for name in ours
        ]
    )


def node_counts(heads: dict[str, dict[str, Any]]) -> list[str]:
    """Return the numbers of draft nodes that a record has."""
    return list(next(iter(heads.values()))["beta"]["exact"])


if __name__ == "__main__":
    main()
