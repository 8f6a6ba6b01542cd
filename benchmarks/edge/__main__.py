"""Devices that draft for a server: are all their tokens right whatever the network does, and how many are served?

    python -m benchmarks.edge --sessions 1000 --faults 1 --output benchmarks/results/edge

First, sessions of the embedded model over a network that delays, loses, repeats, reorders and cuts by a seed, with
drafters of every quality, greedy and sampled, against what one process gives. Then simulated devices over real sockets,
1 to 64 at a time, against the same server streaming plainly, and drafting for all of them by itself. All with servers
of their own. A level is served if all but a tenth of its devices get `--rate` tokens a second from when all have their
first token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.edge.devices import Served, Simulated, edge_device, plain_client
from benchmarks.edge.faults import Faults, faulty
from benchmarks.edge.knowing import Knowing
from benchmarks.endpoint.servers import Server, endpoint
from drafter import EngineConfig, SamplingParams, SpeculativeLM
from drafter.edge.client import EdgeLM
from drafter.embedded import EMBEDDED_BASE
from drafter.evaluation.environment import environment
from drafter.evaluation.questions import read_questions
from drafter.evaluation.results import write_json
from drafter.text.tokenizers import vocabulary_digest

_QUESTIONS = Path(__file__).resolve().parents[2] / "data" / "gsm8k" / "test.jsonl"
LEVELS = (1, 4, 8, 12, 16, 24, 32, 48, 64)
PLAINLY, BY_SERVER, BY_DEVICES = "plain", "the server drafts", "devices draft"
_THREADS = 24
_PROMPT_TOKENS, _TEXTS, _LENGTH = 24, 31, 512
_QUALITIES = (0.0, 0.5, 0.8, 0.95)


@dataclass(frozen=True)
class Level:
    """What one way of serving did for so many devices: tokens a second of each, and bytes a token of all."""

    arm: str
    devices: int
    rates: list[float]
    bytes_per_token: float
    differing: int

    def serves(self, rate: float) -> bool:
        """Whether all but a tenth get that many tokens a second."""
        return sum(one >= rate for one in self.rates) >= 0.9 * self.devices


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write `edge.json` and `summary.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000, help="over the faulty network (default: %(default)s)")
    parser.add_argument("--faults", type=int, default=0, help="seed of what goes wrong (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--model", default=str(EMBEDDED_BASE), help="that devices share (default: the embedded one)")
    parser.add_argument("--server-drafter", default="auto", help="where the server drafts (default: %(default)s)")
    parser.add_argument("--levels", type=int, nargs="*", default=LEVELS, help="devices at a time")
    parser.add_argument("--tokens", type=int, default=48, help="of each text (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=5.0, help="tokens/s that serve a device (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=4, help="draft tokens of a message (default: %(default)s)")
    parser.add_argument("--quality", type=float, default=0.8, help="share that is right (default: %(default)s)")
    parser.add_argument("--draft-ms", type=float, default=10.0, help="of a draft token (default: %(default)s)")
    parser.add_argument("--round-trip-ms", type=float, default=30.0, help="of the network (default: %(default)s)")
    args = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    with _one_process(str(EMBEDDED_BASE), args) as lm:
        faults = _through_faults(lm, _prompts(lm, _TEXTS), args)
    with _one_process(args.model, args) as lm:
        command = shlex.join(["python", "-m", "benchmarks.edge", *given])
        record: dict[str, Any] = {"environment": environment(lm.base, command), "faults": faults}
        record["simulated"] = asdict(_simulated(args)) | {"rate": args.rate, "tokens": args.tokens}
        levels: list[Level] = []
        _write(args, record, levels)
        for level in _levels(lm, _prompts(lm, max(args.levels)), args):  # the record is complete up to each of them
            levels.append(level)
            _write(args, record, levels)
    print((args.output / "summary.json").read_text(encoding="utf-8"))


def _write(args: argparse.Namespace, record: dict[str, Any], levels: Sequence[Level]) -> None:
    """Write what is known so far; a figure that is not is null."""
    served = {arm: _served(levels, arm, args.rate) for arm in (PLAINLY, BY_DEVICES, BY_SERVER)}
    faults, ours = record["faults"], [level for level in levels if level.arm == BY_DEVICES]
    summary = {
        "sessions": faults["sessions"] + sum(level.devices for level in ours),
        "sessions_differing": faults["differing"] + sum(level.differing for level in ours),
        **{name: faults[name] for name in ("cuts", "repeats", "losses")},
        "bytes_per_token": round(ours[-1].bytes_per_token, 1) if ours else None,
        "devices_served": served[BY_DEVICES],
        "devices_served_plainly": served[PLAINLY],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_json(args.output / "edge.json", record | {"served": served, "levels": [asdict(level) for level in levels]})
    write_json(args.output / "summary.json", summary)


def _one_process(model: str, args: argparse.Namespace) -> SpeculativeLM:
    config = EngineConfig(max_num_seqs=max(args.levels), max_queue=512, max_model_len=_LENGTH, kept_rows=0)
    return SpeculativeLM.from_pretrained(model, "none", dtype="float32", config=config)


def _prompts(lm: SpeculativeLM, count: int) -> list[list[int]]:
    return [lm.encode(one.turns[0])[:_PROMPT_TOKENS] for one in read_questions(_QUESTIONS, count)]


def _served(levels: Sequence[Level], arm: str, rate: float) -> int | None:
    measured = [one for one in levels if one.arm == arm]
    return max((one.devices for one in measured if one.serves(rate)), default=0) if measured else None


def _simulated(args: argparse.Namespace) -> Simulated:
    return Simulated(args.nodes, args.quality, args.draft_ms / 1000, args.round_trip_ms / 1000)


def _through_faults(lm: SpeculativeLM, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> dict[str, int]:
    """Run sessions over the faulty network; count those whose text differs, and what went wrong there."""
    sampling = [
        SamplingParams(args.tokens, temperature=0.8 * (row % 2), seed=row, ignore_eos=row % 4 > 1)
        for row in range(len(prompts))
    ]
    expected = lm.generate([list(prompt) for prompt in prompts], sampling, use_tqdm=False)
    chosen = random.Random(args.faults)

    def run(number: int) -> bool:
        row = number % len(prompts)
        drafter = Knowing([*prompts[row], *expected[row].token_ids], _QUALITIES[number % 4], seed=number)
        device = EdgeLM(way, drafter, tokenizer=lm.tokenizer, timeout=0.5, give_up=300.0)
        return device.generate(list(prompts[row]), sampling[row]).token_ids != expected[row].token_ids

    with (
        _server(args, str(EMBEDDED_BASE), "none") as server,
        faulty(server.address, Faults(), chosen.randrange(2**31)) as (way, proxy),
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        differing = sum(pool.map(run, range(args.sessions)))
    print(f"{args.sessions} sessions, {differing} differ: {dict(proxy.counts)}", file=sys.stderr)
    return {"sessions": args.sessions, "differing": differing, **proxy.counts, "messages": proxy.messages}


def _server(args: argparse.Namespace, name: str, drafter: str) -> Any:
    slots = max(args.levels)
    # Twice as many sessions: those of one level may still be closing.
    settings = {"edge.sessions": 2 * slots, "engine.max_num_seqs": slots, "engine.max_model_len": _LENGTH}
    settings |= {"loading.dtype": "float32", "limits.queue": slots}
    model = None if name == str(EMBEDDED_BASE) else name
    return endpoint(model, drafter, [part for name, value in settings.items() for part in (f"--{name}", str(value))])


def _levels(lm: SpeculativeLM, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> Iterator[Level]:
    sampling = SamplingParams(args.tokens, ignore_eos=True)
    texts = [one.token_ids for one in lm.generate([list(one) for one in prompts], sampling, use_tqdm=False)]
    digest = vocabulary_digest(lm.tokenizer)
    for drafter, arms in (("none", (PLAINLY, BY_DEVICES)), (args.server_drafter, (BY_SERVER,))):
        with _server(args, args.model, drafter) as server:
            for devices, arm in product(args.levels, arms):
                level = asyncio.run(_level(server, arm, devices, prompts, texts, digest, args))
                rates, size = level.rates, level.bytes_per_token
                found = f"{sum(rates):.0f} tokens/s in all, {median(rates):.1f} of the median, {size:.0f} bytes each"
                print(f"{arm}, {devices} devices: {found}, {level.differing} differ", file=sys.stderr)
                yield level


async def _level(
    server: Server,
    arm: str,
    devices: int,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    digest: str,
    args: argparse.Namespace,
) -> Level:
    all_here, kind = asyncio.Barrier(devices), _simulated(args)

    def one(row: int) -> Any:
        if arm == BY_DEVICES:
            return edge_device(server.address, digest, prompts[row], texts[row], kind, row, all_here)
        return plain_client(server.address, server.model, prompts[row], texts[row], all_here)

    served: list[Served] = await asyncio.gather(*map(one, range(devices)))
    differing = sum(bool(got.tokens) and got.tokens != list(text) for got, text in zip(served, texts, strict=False))
    tokens = (args.tokens - 1) * devices
    return Level(arm, devices, [got.rate for got in served], sum(got.bytes for got in served) / tokens, differing)


if __name__ == "__main__":
    main()
