"""Convert a draft head's pickled weights to safetensors without running code from the pickle.

    python -m drafter.heads.unpickle FOLDER

PyTorch's restricted loader reads it, which makes nothing but tensors and containers of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from drafter.errors import first_line
from drafter.heads.config import WEIGHTS_FILE, write_whole

_PICKLES = ("hydra_lm_head.pt", "medusa_lm_head.pt", "pytorch_model.bin")


def convert(folder: Path) -> Path:
    """Convert a folder's pickled weights; return the path of the new `model.safetensors`. Raise `ValueError` if not."""
    found = [folder / name for name in _PICKLES if (folder / name).is_file()]
    if not found:
        raise ValueError(f"{folder} has none of {', '.join(_PICKLES)}: give the folder of a draft head")
    target = folder / WEIGHTS_FILE
    if target.exists():
        raise ValueError(f"{target} exists: load the folder as it is, or remove that file to convert again")
    convert_file(found[0], target)
    return target


def convert_file(pickle: Path, target: Path) -> None:
    """Convert one pickled file of named tensors. Raise `ValueError` if the restricted loader does not read it."""
    try:
        tensors = torch.load(pickle, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, by what is in it
        raise ValueError(f"{pickle.name} cannot be converted: {first_line(error)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        raise ValueError(f"{pickle.name} cannot be converted: it holds more than named tensors")
    own = {str(name): one.contiguous().clone() for name, one in tensors.items()}
    write_whole(target, lambda file: save_file(own, file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    try:
        print(f"wrote {convert(parser.parse_args().folder)}")
    except (ValueError, OSError) as error:
        sys.exit(first_line(error))


if __name__ == "__main__":
    main()
