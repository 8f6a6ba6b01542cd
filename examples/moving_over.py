"""One pipeline (read, generate, write) by `ray.data.llm` and by drafter, with the same greedy texts.

vLLM is not needed: Ray's HTTP processor asks an endpoint that this script starts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow.parquet as pq
import ray.data
from ray.data.llm import HttpRequestProcessorConfig
from ray.data.llm import build_processor as build_ray_processor

from pipeline.cluster.ray_cluster import connect, free_ports, quiet_ray_data
from pipeline.dataset.processor import ProcessorConfig, build_processor

QUESTIONS, NEW_TOKENS = "data/gsm8k/test.jsonl", 48
Row = dict[str, Any]


def messages(row: Row) -> list[Row]:
    return [{"role": "user", "content": row["question"]}]


def text_of(response: Row) -> str:
    return str(response["choices"][0]["message"]["content"])


def with_ray(questions: ray.data.Dataset, address: str, output: str) -> None:
    settings = {"model": "local", "max_tokens": NEW_TOKENS, "temperature": 0}
    processor = build_ray_processor(
        HttpRequestProcessorConfig(url=f"{address}/v1/chat/completions", batch_size=4),
        preprocess=lambda row: {"payload": {"messages": messages(row), **settings}},
        postprocess=lambda row: {"question": row["question"], "answer": text_of(row["http_response"])},
    )
    processor(questions).write_parquet(output, mode="overwrite")


def with_drafter(questions: ray.data.Dataset, model: str | None, output: str) -> None:
    processor = build_processor(
        ProcessorConfig(model, batch_size=4, sampling_params={"max_new_tokens": NEW_TOKENS, "temperature": 0}),
        preprocess=lambda row: {**row, "messages": messages(row)},
        postprocess=lambda row: {"question": row["question"], "answer": row["text"]},
    )
    processor(questions).write_parquet(output, mode="overwrite")


@contextmanager
def endpoint(model: str | None) -> Iterator[str]:
    """Run `drafter serve` on a Ray of its own; yield its address."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "jobs.serve", "--name", "local", "--port", str(port)]
    command += ["--model", model] if model else []
    own_ray = {**os.environ, "RAY_ADDRESS": "local"}
    with subprocess.Popen(command, env=own_ray, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not any(line.startswith("serving ") for line in process.stdout or ()):
                raise SystemExit("the endpoint did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both pipelines; return 0 if their texts are the same."""
    parser = argparse.ArgumentParser(prog="python -m examples.moving_over", description=__doc__)
    parser.add_argument("--model", help="a hub id or a folder; by default the embedded demonstration model")
    parser.add_argument("--output", type=os.path.abspath, default="build/moving-over", help="a folder")
    parser.add_argument("--rows", type=int, default=8)
    given = parser.parse_args(arguments)
    connect()
    quiet_ray_data()
    questions = ray.data.read_json(QUESTIONS).limit(given.rows)
    with endpoint(given.model) as address:
        with_ray(questions, address, f"{given.output}/ray")
    with_drafter(questions, given.model, f"{given.output}/drafter")
    theirs, ours = (pq.read_table(f"{given.output}/{name}").sort_by("question") for name in ("ray", "drafter"))
    print(f"{ours.num_rows} rows, {'the same texts' if ours == theirs else 'texts that differ'}: {given.output}")
    return 0 if ours == theirs else 1


if __name__ == "__main__":
    sys.exit(main())
