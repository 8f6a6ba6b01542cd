"""A model of a published configuration with random weights, to measure the speed of one whose weights cannot be had.

    python -m benchmarks.peers.random_model benchmarks/peers/configurations/gemma-3-270m.json /tmp/gemma-3-270m-random
    python -m benchmarks.peers --model /tmp/gemma-3-270m-random --batches 1 4 16 --contexts short --output FOLDER

Weights are exact in bf16, as published ones are. The tokeniser is that of the embedded model, as its tokens are in any
vocabulary.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafter.embedded import EMBEDDED_BASE

_STANDARD_DEVIATION = 0.02  # with larger embeddings that are tied to the LM head, each token would follow itself
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main() -> None:
    """Write the model as transformers has it."""
    parser = argparse.ArgumentParser("python -m benchmarks.peers.random_model", description=__doc__)
    parser.add_argument("configuration", type=Path, help="`config.json` of a model")
    parser.add_argument("output", type=Path, help="folder of the model")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(args.configuration)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=_STANDARD_DEVIATION)
    model.save_pretrained(args.output)
    for name in _TOKENIZER:
        shutil.copy(EMBEDDED_BASE / name, args.output)


if __name__ == "__main__":
    main()
