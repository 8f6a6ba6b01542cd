"""`transformers.generate`, as its users call it: in batches padded on the left."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.workers.protocol import Decode, Decoded, Settings, serve
from benchmarks.peers.workers.this_engine import requests_of
from benchmarks.transformers_decoder import transformers_decoder


def load(settings: Settings) -> Decode:
    """Load the model, not as a base of this engine, which would hold its weights in other forms, too."""
    torch.set_num_threads(settings.threads)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype).eval()
    decode = transformers_decoder(model, settings.ends, settings.batch, settings.ends[0])
    return lambda work: Decoded(decode(requests_of(work)).outputs)


if __name__ == "__main__":
    serve(load, ["torch", "transformers"])
