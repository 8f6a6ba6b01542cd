"""Sharpen a CTC head that is trained: the tokens of its frames become surer, and the blank stays as likely as it is.

    python -m recipes.sharpen trained/head --by 2

A head learns what its target model finds likely at temperature 1. What is decoded, greedily or at a low temperature,
is surer than that, and the tree of the most probable prefixes is another one: deeper, with fewer alternatives. So all
logits are multiplied, by the weights of the norm before the LM head. `python -m studies.sharpness` says what it gains.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.heads.config import CONFIG_FILE, WEIGHTS_FILE

_SHARPENED = "sharpened"


def sharpened(tensors: Mapping[str, Tensor], by: float) -> dict[str, Tensor]:
    """Return a head's tensors with its logits multiplied. The blank reads the same states: its weights are divided."""
    factors = {"norm.weight": by, "norm.bias": by, "blank.weight": 1 / by}
    return {name: tensor * factors[name] if name in factors else tensor for name, tensor in tensors.items()}


def sharpen(folder: Path, by: float) -> None:
    """Multiply a head's logits, in its files, and write that into its training's record.

    Raises:
        ValueError: It is no CTC head with a blank, or has been sharpened.
    """
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    if config["algorithm"] != "ctc" or config["head"]["loss"] == "ce":
        raise ValueError(f"{folder} has no CTC head with a blank")
    if _SHARPENED in config["training"]:
        raise ValueError(
            f"{folder} has been sharpened by {config['training'][_SHARPENED]}: begin with the trained head"
        )
    config["training"][_SHARPENED] = by
    tensors = sharpened(load_file(folder / WEIGHTS_FILE), by)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of a head")
    parser.add_argument("--by", type=float, required=True, help="what logits are multiplied by")
    args = parser.parse_args()
    try:
        sharpen(args.head, args.by)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
