"""What does one key learn of another key's prompt, by the times of its own answers?

    python -m benchmarks.endpoint.other_keys --json benchmarks/results/other_keys.json

While one key's answer streams, whose prompt has a secret of eight digits, another key guesses these one by one by the
time until its own first token. It also compares prompts that begin like the other one with prompts that do not: the
AUC is the probability that the first kind is answered sooner (0.5: the times tell nothing). The same is done with the
owner's key, for which the prefix is shared. Exits with 1 where another key finds more than two digits, has an AUC of
0.6 or more, or can read `/metrics`. All of it stays on this machine's loopback address.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx2

from benchmarks.endpoint.servers import Server, endpoint
from drafter.source_commit import source_commit

_OWNER, _OTHER, _OPERATOR = "sk-of-the-owner", "sk-of-another", "sk-of-the-operator"
_SECRET = "94580730"
_MOST_DIGITS, _AUC = 2, 0.6


@dataclass(frozen=True)
class Learned:
    """What a key has learned.

    Args:
        digits: Of the secret, that were guessed in order before the first wrong one.
        auc: Of the times of prompts that begin like the owner's, and of others.
        equal, different: Median seconds of these.
    """

    key: str
    digits: int
    auc: float
    equal: float
    different: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Try it with another key and with the owner's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="of equal and different prompts (default: %(default)s)")
    parser.add_argument("--tries", type=int, default=3, help="of each digit (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where results are written")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.txt"
        keys.write_text(f"{_OWNER}\n{_OTHER}\n{_OPERATOR} operator\n", encoding="ascii")
        with endpoint(None, "ctc", ["--keys_file", str(keys), "--engine.num_draft_tokens", "16"]) as server:
            metrics = {key: _ask(server, key, "GET", "/metrics").status_code for key in (_OTHER, _OPERATOR)}
            found = [_learn(server, name, key, args) for name, key in (("another", _OTHER), ("the owner's", _OWNER))]
    print(f"/metrics: {metrics[_OTHER]} for another key, {metrics[_OPERATOR]} for an operator's")
    for one in found:
        print(
            f"{one.key + ' key':16} {one.digits} of {len(_SECRET)} digits  AUC {one.auc:.2f}  "
            f"{1e3 * one.equal:.0f} ms where the beginning is equal, {1e3 * one.different:.0f} ms where it is not"
        )
    if args.json:
        results = {"commit": source_commit(), "metrics": list(metrics.values()), "keys": [asdict(one) for one in found]}
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if metrics[_OTHER] == 200 or found[0].digits > _MOST_DIGITS or found[0].auc >= _AUC:
        raise SystemExit(1)


def _learn(server: Server, name: str, key: str, args: argparse.Namespace) -> Learned:
    """Guess, and compare, while the owner's answers stream."""
    rng = random.Random(0)
    with _streaming(server, f"Remember this: my PIN is {_SECRET} "):
        known = ""
        for _ in _SECRET:
            seconds = {str(digit): list[float]() for digit in range(10)}
            for _ in range(args.tries):
                for digit in rng.sample(list(seconds), 10):
                    seconds[digit].append(_seconds(server, key, f"Remember this: my PIN is {known}{digit}"))
            best = min(seconds, key=lambda digit: sorted(seconds[digit])[args.tries // 2])
            if best != _SECRET[len(known)]:
                break
            known += best
    text = " ".join(rng.choice(["Tom", "Anna", "has", "sells", "3", "12", "apples", "books"]) for _ in range(500))
    times: dict[bool, list[float]] = {True: [], False: []}
    with _streaming(server, text):
        for _ in range(args.pairs):
            for equal in rng.sample([True, False], 2):
                times[equal].append(_seconds(server, key, text if equal else f"5 {text}"))
    pairs = [(one < other) + 0.5 * (one == other) for one in times[True] for other in times[False]]
    median = {equal: sorted(found)[len(found) // 2] for equal, found in times.items()}
    return Learned(name, len(known), sum(pairs) / len(pairs), median[True], median[False])


def _seconds(server: Server, key: str, text: str) -> float:
    begun = time.perf_counter()
    body = {"model": server.model, "prompt": text, "max_tokens": 1, "stream": True, "temperature": 0}
    _ask(server, key, "POST", "/v1/completions", body).raise_for_status()
    return time.perf_counter() - begun


def _ask(server: Server, key: str, method: str, path: str, body: object = None) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.request(method, server.address + path, json=body, headers=headers, timeout=60)


@contextmanager
def _streaming(server: Server, text: str) -> Iterator[None]:
    """Have the owner's prompt answered again and again in a `with` block, from when the first token has come."""
    over, begun = threading.Event(), threading.Event()
    body = {"model": server.model, "prompt": text, "max_tokens": 300, "stream": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {_OWNER}"}

    def stream() -> None:
        while not over.is_set():
            with httpx2.stream("POST", f"{server.address}/v1/completions", json=body, headers=headers) as response:
                for _ in response.iter_lines():
                    begun.set()
                    if over.is_set():
                        break

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        begun.wait(60)
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
