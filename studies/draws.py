"""How many draws rounding changes, and how long a draw takes: keyed Gumbel noise beside an inverse CDF.

    python -m studies.draws --output studies/results/draws
    python -m studies.draws --model build/smollm2/base --tokens 24 --output studies/results/draws-smollm2

The base's own answers to GSM8K's test questions are read again, in fp32 and in bf16: token by token, eight tokens in a
forward as when drafts are verified, and in a batch. The logits differ by rounding alone. From each pair, the same seeds
draw a token at every place of the answers.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.costs import timed
from benchmarks.heads import answers
from drafter.acceptance.sampling import draw, seed_key
from drafter.devices import in_passing_thread
from drafter.embedded import EMBEDDED_BASE
from drafter.evaluation.environment import environment, machine
from drafter.evaluation.results import write_json
from drafter.evaluation.tables import markdown_table
from drafter.target_model.cache import TargetCache
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import TreeNodes
from drafter.text.tokenizers import load_tokenizer
from drafter.training.targets import RegeneratedText

DRAWS_FILE, TABLE_FILE = "draws.json", "draws.md"
TEMPERATURES = (0.7, 1.0)
_TEXTS = 16
_PLACES = 128
"""Places whose distributions are in memory at once."""
_ROWS = (1, 4, 17, 64)
"""Rows of a draw that is timed."""


@dataclass(frozen=True)
class Reading:
    """A way to compute the logits of texts.

    Args:
        name: What it is called.
        dtype: Precision of the base.
        rows: Texts in a forward.
        nodes: Tokens of each text in a forward.
    """

    name: str
    dtype: torch.dtype
    rows: int
    nodes: int


ALONE = Reading("bf16, alone", torch.bfloat16, 1, 1)
EXACT = Reading("fp32, alone", torch.float32, 1, 1)
READINGS = (
    EXACT,
    ALONE,
    Reading("bf16, eight tokens in a forward", torch.bfloat16, 1, 8),
    Reading("bf16, in a batch of 16", torch.bfloat16, 16, 1),
)
PAIRS = ((READINGS[2], ALONE), (READINGS[3], ALONE), (ALONE, EXACT))


@dataclass(frozen=True)
class Changed:
    """Draws from the logits of two readings.

    Args:
        reading: Name of one.
        beside: Name of the other.
        temperature: Temperature of the draws.
        draws: Number of draws from each.
        distance: Mean total variation distance of the two distributions.
        keyed: Draws that differ with keyed noise.
        inverse: Draws that differ with an inverse CDF.
    """

    reading: str
    beside: str
    temperature: float
    draws: int
    distance: float
    keyed: int
    inverse: int


@dataclass(frozen=True)
class Cost:
    """Median seconds of one draw at temperature 1.

    Args:
        vocabulary: Number of tokens.
        rows: Rows that are drawn together.
        keyed: Seconds with keyed noise.
        inverse: Seconds with an inverse CDF.
    """

    vocabulary: int
    rows: int
    keyed: float
    inverse: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the record and its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="the base (default: the embedded one)")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=64, help="seeds that draw at every place (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {DRAWS_FILE} and {TABLE_FILE}")
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(given)
    command = shlex.join(["python", "-m", "studies.draws", *given])
    record = in_passing_thread(lambda: measure(args.model, args.tokens, args.seeds, command))
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / DRAWS_FILE, record)
    print(write_table(args.output))


@torch.inference_mode()
def measure(model: str, tokens: int, seeds: int, command: str) -> dict[str, object]:
    """Return the record of all measurements."""
    exact = load_base(model, dtype=EXACT.dtype, device="cpu")
    texts = answers(exact, load_tokenizer(model), _TEXTS, tokens)
    rounded = load_base(model, dtype=ALONE.dtype, device="cpu")
    logits = {one: read(exact if one is EXACT else rounded, texts, one) for one in READINGS}
    return {
        "environment": environment(exact, command),
        "tokens": len(logits[EXACT]),
        "changed": [asdict(one) for one in changed(logits, seeds)],
        "costs": [asdict(one) for one in costs(logits[EXACT])],
    }


def read(base: BaseModel, texts: Sequence[RegeneratedText], how: Reading) -> Tensor:
    """Logits `[T, V]` after each token of the texts' answers but the last, one text after the other."""
    found = []
    for first in range(0, len(texts), how.rows):
        some = texts[first : first + how.rows]
        before = torch.tensor([text.prompt_length - 1 for text in some])
        answers = [torch.tensor(text.tokens[text.prompt_length - 1 : -1]) for text in some]
        tokens = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True)
        longest = tokens.shape[1]
        cache = base.new_cache(len(some), int(before.max()) + longest)
        for slot, text in enumerate(some):
            if text.prompt_length > 1:
                base.prefill(cache, slot, [torch.tensor(text.tokens[: text.prompt_length - 1])])
        logits = torch.cat(
            [
                _step(base, cache, tokens[:, start : start + how.nodes], before + start)
                for start in range(0, longest, how.nodes)
            ],
            1,
        )
        found += [one[: len(answer)] for one, answer in zip(logits, answers, strict=True)]
    return torch.cat(found)


def _step(base: BaseModel, cache: TargetCache, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Logits `[B, N, V]` of `tokens` `[B, N]` behind `lengths` `[B]` positions, in one forward."""
    rows, count = tokens.shape
    depths = torch.arange(count).expand(rows, -1)
    nodes = TreeNodes(
        tokens=tokens,
        lengths=lengths,
        positions=lengths[:, None] + depths,
        kv_length=int(lengths.max()) + count,
        parents=depths - 1,
        ancestors=torch.ones(count, count, dtype=torch.bool).tril().expand(rows, -1, -1),
    )
    return base.verify(cache, nodes)[0]


def changed(logits: dict[Reading, Tensor], seeds: int) -> Iterator[Changed]:
    """Draw from both readings of each pair."""
    size = len(logits[EXACT])
    uniforms = torch.rand(size, seeds, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for temperature in TEMPERATURES:
        sums = {pair: [0.0, 0, 0] for pair in PAIRS}
        for places in torch.arange(size).split(_PLACES):
            scores = {one: scores_of(logits[one][places], temperature) for one in READINGS}
            distributions = {one: scores[one].softmax(-1) for one in READINGS}
            inverse = {one: inverse_cdf(distributions[one], uniforms[places]) for one in READINGS}
            keyed = {one: keyed_draws(scores[one], places, seeds) for one in READINGS}
            for one, other in PAIRS:
                sums[one, other][0] += float((distributions[one] - distributions[other]).abs().sum()) / 2
                sums[one, other][1] += int((keyed[one] != keyed[other]).sum())
                sums[one, other][2] += int((inverse[one] != inverse[other]).sum())
        for (one, other), (distance, keyed_differ, inverse_differ) in sums.items():
            yield Changed(
                one.name, other.name, temperature, size * seeds, distance / size, int(keyed_differ), int(inverse_differ)
            )


def scores_of(logits: Tensor, temperature: float) -> Tensor:
    """`[T, V]` float64, as they are drawn from."""
    scores = logits.double() / temperature
    return scores - scores.amax(-1, keepdim=True)


def keyed_draws(scores: Tensor, positions: Tensor, seeds: int) -> Tensor:
    """`[T, seeds]` tokens."""
    keys = [torch.tensor(seed_key(seed)).expand(len(scores)) for seed in range(seeds)]
    return torch.stack([draw(scores, key, positions) for key in keys], 1)


def inverse_cdf(distributions: Tensor, uniforms: Tensor) -> Tensor:
    """`[T, S]` tokens: the first whose cumulative probability, in order of token id, exceeds its uniform `[T, S]`."""
    cumulative = distributions.cumsum(-1)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


def costs(logits: Tensor) -> Iterator[Cost]:
    """Time both draws on what the base says at places all over its answers."""
    scores = scores_of(logits, 1.0)
    for rows in _ROWS:
        some = scores[:: len(scores) // rows][:rows].contiguous()
        keys, positions = torch.arange(rows) * 7919, torch.arange(rows)
        uniforms = torch.rand(rows, 1, dtype=torch.float64)
        keyed = timed(lambda: draw(some, keys, positions), some.device)  # noqa: B023
        inverse = timed(lambda: inverse_cdf(some.softmax(-1), uniforms), some.device)  # noqa: B023
        yield Cost(scores.shape[1], rows, keyed, inverse)


def write_table(folder: Path) -> str:
    """Write `draws.md` from `draws.json` in `folder`. Return it."""
    record = json.loads((folder / DRAWS_FILE).read_text(encoding="utf-8"))
    about = record["environment"]
    shares = [
        {
            "temperature": one.temperature,
            "logits": f"{one.reading} – {one.beside}",
            "total variation": f"{one.distance:.2%}",
            "keyed noise": f"{one.keyed / one.draws:.2%}",
            "inverse CDF": f"{one.inverse / one.draws:.2%}",
        }
        for one in (Changed(**changed) for changed in record["changed"])
    ]
    times = [
        {
            "vocabulary": f"{one.vocabulary:,}",
            "rows": one.rows,
            "keyed noise µs": f"{1e6 * one.keyed:.0f}",
            "inverse CDF µs": f"{1e6 * one.inverse:.0f}",
        }
        for one in (Cost(**cost) for cost in record["costs"])
    ]
    page = (
        f"# Draws\n\n{machine(about)}, {about['threads']} threads; base of {about['base']['parameters']:,} parameters. "
        f"`{about['command']}`, commit {about['commit']}.\n\n## Draws that rounding changes\n\nShare of "
        f"{record['changed'][0]['draws']:,} draws, at {record['tokens']:,} places, that differ between logits of the "
        f"same text computed in two ways.\n\n{markdown_table(shares)}\n\n## Time of a draw\n\nAt temperature 1, from "
        f"fp32 logits; medians.\n\n{markdown_table(times)}\n"
    )
    (folder / TABLE_FILE).write_text(page, encoding="utf-8")
    return page


if __name__ == "__main__":
    main()
