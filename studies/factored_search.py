"""β of a CTC head with a label context, by its LM head as it is and by the factored one that GPUs use.

    python -m studies.factored_search --output studies/results/factored-search

Both are the same function but for rounding, so β should differ by no more than rounding makes it. The trees are walked
along the base's own greedy answers to held-out GSM8K questions, in fp32 and in bf16.

Beside it: how much of what is drafted a shortlist would have, of the tokens that any frame finds likely once it knows
the text's last labels. That would be the other way to read the LM head once.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.operators import as_on_a_gpu
from benchmarks.heads import answers
from drafter.ctc.head import CTCHead, FrameLattice, label_factor
from drafter.ctc.lattice import LATTICE_BEAM, best_lattice_trie
from drafter.drafters.target import Target
from drafter.embedded import EMBEDDED_BASE, EMBEDDED_HEADS
from drafter.errors import LoadError
from drafter.evaluation.environment import environment
from drafter.evaluation.questions import QuestionError
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.heads.checkpoint import HEADS, load_head
from drafter.heads.config import Tree
from drafter.heads.contract import DraftHead
from drafter.heads.frame_head import last_tokens
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.text.tokenizers import load_tokenizer
from drafter.training.targets import RegeneratedText, base_hidden_states, draft_batch, simulated_beta
from drafter.tree.token_tree import TokenTree

NODES = (15, 63)
SHORTLISTS = (256, 512, 1024, 2048)
"""Tokens of a row's shortlist, where the head drafts more."""
FACTORED_FILE, TABLE_FILE = "factored_search.json", "factored_search.md"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FactoredCTCHead(CTCHead):
    """The same head, with the search of GPUs."""

    def search(
        self, states: Tensor, recent: Tensor, base: Target, size: int, tree: Tree, least: float = 0.0
    ) -> TokenTree:
        """See `FrameHead.search`."""
        config, factor = self.config, label_factor(self, base)
        model = FrameLattice(self, base, states, recent, factor)
        with as_on_a_gpu():
            return best_lattice_trie(
                model, recent[:, -1], states.shape[1], config.band, config.depth, size, LATTICE_BEAM
            )


WAYS: dict[str, type[DraftHead]] = {"as it is": CTCHead, "factored": FactoredCTCHead}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {FACTORED_FILE} and {TABLE_FILE}")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="the head's base (default: the embedded one)")
    parser.add_argument("--drafter", type=Path, default=EMBEDDED_HEADS / "ctc", help="folder of a CTC head")
    parser.add_argument("--questions", type=int, default=12, help="held-out questions (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    command = shlex.join(["python", "-m", "studies.factored_search", *given])
    try:
        record = measure(args.model, args.drafter, args.questions, args.max_new_tokens, command)
    except (LoadError, QuestionError) as error:
        raise SystemExit(f"error: {error}") from error
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / FACTORED_FILE, record)
    print(write_table(args.output))


def measure(model: str, folder: Path, questions: int, max_new_tokens: int, command: str) -> dict[str, Any]:
    """Return β of each way in each dtype, and what shortlists cover.

    Raises:
        LoadError: The folder has no CTC head of this base, or one whose frames do not know labels.
        QuestionError: There are not so many questions.
    """
    record: dict[str, Any] = {"arms": []}
    for name, dtype in DTYPES.items():
        base = load_base(model, device="cpu", dtype=dtype)
        texts = answers(base, load_tokenizer(model), questions, max_new_tokens)
        for way, kind in WAYS.items():
            with patch.dict(HEADS, {"ctc": kind}):
                head = load_head(folder, base)
            if not head.config.label_context:
                raise LoadError(f"{folder} is a CTC head without a label context: it reads the LM head once as it is")
            beta = simulated_beta(head, base, texts, NODES)
            tokens = sum(len(text.anchors) for text in texts)
            record["arms"].append(
                {"dtype": name, "LM head": way, "tokens": tokens, "beta": {str(nodes): beta[nodes] for nodes in NODES}}
            )
            print(record["arms"][-1], file=sys.stderr)
        if "shortlists" not in record:
            head = load_head(folder, base)
            assert isinstance(head, CTCHead)
            record["environment"] = environment(base, command)
            record["vocabulary"] = len(head.output(base).lm_head_weight)
            record["shortlists"] = [{"nodes": nodes, "covered": covered(head, base, texts, nodes)} for nodes in NODES]
    return record


@torch.inference_mode()
def covered(head: CTCHead, base: BaseModel, texts: Sequence[RegeneratedText], nodes: int) -> dict[str, float]:
    """Return the share of drafted tokens that are in a shortlist, by its size.

    Args:
        head: A CTC head with a label context.
        base: Its base.
        texts: Texts of the base, at whose positions trees are drafted.
        nodes: Draft nodes of a tree.
    """
    output = head.output(base)
    sizes = [size for size in SHORTLISTS if size < len(output.lm_head_weight)]
    found, drafted = dict.fromkeys(sizes, 0), 0
    for text in texts:
        batch = draft_batch([text], head.config.depth, len(text.anchors))
        hidden = base_hidden_states(base, batch.tokens, head.hidden_layers)
        states = head.module(base.embed(batch.tokens), hidden, batch.anchors).flatten(0, 1)
        recent = last_tokens(batch.tokens, batch.anchors, head.recent_tokens).flatten(0, 1)
        terms = head.joint_frames(states) + head.label_terms(base, recent)[:, None]
        likely = head.token_log_probs(head.joint(states, terms)[0], output.lm_head).amax(1)
        tree = head.search(states, recent, base, nodes + 1, "exact")
        real = tree.tokens[:, 1:] >= 0
        drafted += int(real.sum())
        for size in sizes:
            listed = torch.zeros_like(likely, dtype=torch.bool).scatter_(1, likely.topk(size).indices, True)
            found[size] += int((listed.gather(1, tree.tokens[:, 1:].clamp_min(0)) & real).sum())
    return {str(size): count / drafted for size, count in found.items()}


def write_table(folder: Path) -> str:
    """Write `factored_search.md` from `factored_search.json` in `folder`. Return the table."""
    record = json.loads((folder / FACTORED_FILE).read_text(encoding="utf-8"))
    about = record["environment"]
    table = markdown_table(
        [
            {"dtype": arm["dtype"], "LM head": arm["LM head"], "tokens": f"{arm['tokens']:,}"}
            | {f"β, {nodes} nodes": f"{arm['beta'][str(nodes)]:.3f}" for nodes in NODES}
            for arm in record["arms"]
        ]
    )
    shortlists = markdown_table(
        [
            {"draft nodes": one["nodes"]} | {f"best {size}": f"{share:.3f}" for size, share in one["covered"].items()}
            for one in record["shortlists"]
        ]
    )
    page = (
        f"# The factored LM head\n\nβ on held-out GSM8K questions, greedy. `{about['command']}`, commit "
        f"{about['commit']}.\n\n{table}\n\n"
        f"Share of the drafted tokens that are among the best of {record['vocabulary']:,} by any frame that knows the "
        f"text's last labels:\n\n{shortlists}\n"
    )
    (folder / TABLE_FILE).write_text(page, encoding="utf-8")
    return table


if __name__ == "__main__":
    main()
