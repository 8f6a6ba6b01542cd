"""OpenVINO GenAI with continuous batching, plain and with its prompt lookup."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.workers.protocol import Decode, Decoded, Settings, Work, serve

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_LOOKED_UP, _LONGEST_MATCH = 5, 3
"""Tokens that prompt lookup takes at a time, and the longest n-gram it looks for: those of its documentation."""


def load(settings: Settings) -> Decode:
    """Read a GGUF file. A model of another kind is exported with optimum, unless that was done before."""
    source = Path(settings.model)
    if source.suffix != ".gguf" and not (source := Path(settings.folder) / "openvino").exists():
        _export(settings.model, source)
    scheduling = _scheduling(settings.batch)
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(source), scheduling, "CPU", _properties(settings))

    def decode(work: Work) -> Decoded:
        waiting = deque(enumerate(work.prompts))
        running: dict[int, Any] = {}
        texts: list[list[int]] = [[] for _ in work.prompts]
        steps = 0
        # With the scheduling that is the default `max_num_seqs` limits nothing.
        while waiting or running:
            while waiting and len(running) < settings.batch:
                place, prompt = waiting.popleft()
                running[place] = pipeline.add_request(place, _tensor(prompt), _sampling(settings, work, place))
            pipeline.step()
            steps += len(running)
            for place, handle in list(running.items()):
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    (output,) = running.pop(place).read_all()
                    texts[place] = list(output.generated_ids)
        return Decoded(texts, steps)

    return decode


def _export(model: str, folder: Path) -> None:
    """Write the model in OpenVINO's form, with weights of fp32. The plugin rounds them if it is told to."""
    partial = folder.with_name(f"{folder.name}.partial")
    program = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", model]
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32", str(partial)]
    subprocess.run([*program, *options], check=True, stdin=subprocess.DEVNULL)
    partial.rename(folder)


def _tensor(prompt: list[int]) -> Any:
    return openvino.Tensor(np.array([prompt], dtype=np.int64))


def _scheduling(batch: int) -> Any:
    config = openvino_genai.SchedulerConfig()
    config.max_num_seqs = batch
    config.enable_prefix_caching = False
    return config


def _properties(settings: Settings) -> dict[str, Any]:
    precision = _PRECISIONS[settings.dtype]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": settings.threads,
    }
    return properties | ({} if settings.variant == "plain" else {"prompt_lookup": True})


def _sampling(settings: Settings, work: Work, place: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = work.max_new_tokens
    config.do_sample = False
    config.stop_token_ids = set(settings.ends)
    if settings.variant != "plain":
        config.num_assistant_tokens = _LOOKED_UP
        config.max_ngram_size = _LONGEST_MATCH
    if work.schemas:
        config.structured_output_config = openvino_genai.StructuredOutputConfig(json_schema=work.schemas[place])
    return config


if __name__ == "__main__":
    serve(load, ["openvino-genai", "openvino"])
