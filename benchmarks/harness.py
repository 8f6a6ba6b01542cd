"""What the benchmarks share: settings, prompts, a clock for stages, the record of where they ran, tables and files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

from drafter import Generation, LoadError, Request, SamplingParams
from drafter.base_model import BaseModel, load_tokenizer
from drafter.embedded import EMBEDDED_BASE
from drafter.engine import Engine
from recipes.embedded.gsm8k import read_split

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def make_parser(description: str | None, *, prompts: int) -> argparse.ArgumentParser:
    """A command line with the settings that every benchmark has; `prompts` is how many it takes by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=str(EMBEDDED_BASE), help="base: folder or hub id (default: the embedded one)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=prompts, help="held-out GSM8K questions (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument(
        "--output", type=Path, help="result file (default: in benchmarks/results, named by the hardware)"
    )
    return parser


def run(main: Callable[[], None]) -> None:
    """Run a benchmark; what cannot be loaded is said in one line."""
    try:
        main()
    except LoadError as error:
        raise SystemExit(f"error: {error}") from error


def load_base(args: argparse.Namespace) -> tuple[BaseModel, Any]:
    """The base and its tokeniser, as the command line asks for them; also sets the threads."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return BaseModel.from_pretrained(args.model, device=args.device, dtype=args.dtype), load_tokenizer(args.model)


def held_out_prompts(tokenizer: Any, first: int, count: int) -> list[list[int]]:
    """Token ids of GSM8K test questions `first` to `first + count - 1`, as chats where there is a chat template."""
    questions = [problem.question for problem in read_split("test")[first : first + count]]
    if len(questions) < count:
        raise SystemExit(f"there are no {first + count} held-out questions: give a smaller --prompts")
    if tokenizer.chat_template is not None:
        questions = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            for question in questions
        ]
    return [list(ids) for ids in tokenizer(questions, add_special_tokens=tokenizer.chat_template is None)["input_ids"]]


def decode_all(engine: Engine, prompts: list[list[int]], max_new_tokens: int) -> tuple[float, list[Generation]]:
    """Decode the prompts greedily; return the seconds from the first submission to the last token, and the results."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    synchronise(engine.base.device)
    start = time.perf_counter()
    handles = [engine.submit(Request(ids, sampling)) for ids in prompts]
    while not engine.idle:
        engine.step()
    synchronise(engine.base.device)
    return time.perf_counter() - start, [handle.result(0) for handle in handles]


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StageClock:
    """Seconds spent in each stage, by wrapping functions from outside. A stage inside another pauses the outer one.

    On a GPU it waits for the device at each change of stage, so that it slows down what it measures: use it for
    shares, not for rates.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def timing(self, stages: Sequence[tuple[Any, str, str]]) -> Iterator[None]:
        """Time `(owner, attribute, stage)`: calls of a method or module function count towards the stage."""
        patches = [patch.object(owner, name, self._timed(getattr(owner, name), stage)) for owner, name, stage in stages]
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._change()
            self._open.append(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self._change()
                self._open.pop()

        return timed

    def _change(self) -> None:
        synchronise(self._device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def environment(base: BaseModel) -> dict[str, Any]:
    """Hardware, versions, commit and command line of this run."""
    gpu = torch.cuda.get_device_name(base.device) if base.device.type == "cuda" else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _module_name(), *sys.argv[1:]]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "hardware": {"processor": _processor(), "cores": os.cpu_count(), "gpu": gpu},
        "threads": torch.get_num_threads(),
        "dtype": str(base.dtype).removeprefix("torch."),
        "attention": base.config._attn_implementation,
        "base": {
            "fingerprint": base.fingerprint,
            "type": base.config.model_type,
            "parameters": sum(parameter.numel() for parameter in base.model.parameters()),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def write_result(name: str, output: Path | None, record: Mapping[str, Any]) -> None:
    """Write a benchmark's record as JSON, by default to `results/NAME-HARDWARE.json`."""
    hardware = record["environment"]["hardware"]
    machine = hardware["gpu"] or f"{hardware['processor']} {hardware['cores']} cores"
    path = output or RESULTS / f"{name}-{re.sub(r'[^a-z0-9]+', '-', machine.lower()).strip('-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows as a Markdown table, headed by the first row's keys."""
    lines: list[list[object]] = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def _module_name() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).stem


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # not a checkout


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
