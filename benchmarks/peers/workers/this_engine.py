"""This engine, with any drafter."""

from __future__ import annotations

import torch

from benchmarks.peers.workers.protocol import Decode, Decoded, Settings, Work, serve
from drafter.devices import in_passing_thread
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.evaluation.decoders import decode_all
from drafter.requests import Request, SamplingParams
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer


def load(settings: Settings) -> Decode:
    """Load the base. The variant is the drafter's name.

    Texts are isolated, and no rows are kept: in each round the prompts are the same, so what is kept of earlier texts
    has the answers.
    """
    torch.set_num_threads(settings.threads)
    base = in_passing_thread(lambda: load_base(settings.model, dtype=settings.dtype, device="cpu"))
    drafter = load_drafter(settings.variant, base, useful_nodes(base.device), isolated=True)
    config = EngineConfig(settings.batch, settings.longest, kept_rows=0)
    engine = Engine(base, drafter, load_tokenizer(settings.model), config)

    def decode(work: Work) -> Decoded:
        run = decode_all(engine, requests_of(work))
        return Decoded(run.outputs, sum(one.num_decode_steps for one in run.counts))

    return decode


def requests_of(work: Work) -> list[Request]:
    """Return the requests of this engine for some work."""
    return [Request(prompt, SamplingParams(work.max_new_tokens)) for prompt in work.prompts]


if __name__ == "__main__":
    serve(load, ["torch", "transformers"])
