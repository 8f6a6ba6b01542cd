"""Convert a draft head's pickled weights to safetensors without running code from the pickle.

    python -m drafter.heads.unpickle FOLDER

PyTorch's restricted loader reads the pickle in a separate process, which cannot open files and has a time limit. Where
the system allows it, the process also has no network and starts no other process.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import os
import resource
import subprocess
import sys
from pathlib import Path

from drafter.errors import first_line
from drafter.heads.config import WEIGHTS_FILE

_PICKLES = ("hydra_lm_head.pt", "medusa_lm_head.pt", "pytorch_model.bin")
_SECONDS = 600
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A process with threads cannot leave its user namespace, and libraries start threads when they are imported."""


def convert(folder: Path) -> Path:
    """Convert a folder's pickled weights; return the path of the new `model.safetensors`. Raise `ValueError` if not."""
    found = [folder / name for name in _PICKLES if (folder / name).is_file()]
    if not found:
        raise ValueError(f"{folder} has none of {', '.join(_PICKLES)}: give the folder of a draft head")
    target = folder / WEIGHTS_FILE
    if target.exists():
        raise ValueError(f"{target} exists: load the folder as it is, or remove that file to convert again")
    try:
        convert_file(found[0], target)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{found[0].name} cannot be converted: it took more than {error.timeout:g} seconds") from error
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {first_line(error)}") from error
    return target


def convert_file(pickle: Path, target: Path) -> None:
    """Convert one pickled file of named tensors in another process, then rename it to `target`.

    `ValueError` if the restricted loader does not read it, `TimeoutExpired` if that takes too long, `OSError` of files.
    """
    temporary = target.with_name(target.name + ".tmp")
    temporary.touch()
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--inside", str(pickle), str(temporary)]
    environment = os.environ | _ONE_THREAD
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=environment)
        if done.returncode:
            last = (done.stderr.strip() or "it ended without a word").splitlines()[-1]
            raise ValueError(f"{pickle.name} cannot be converted: {last}")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _inside(pickle: Path, target: Path) -> None:
    import torch  # the process that waits does not need it
    from safetensors.torch import save

    torch.set_num_threads(1)
    # Rehearse both formats before opening files is forbidden: PyTorch imports some of its modules only then.
    for zipped in (True, False):
        torch.save({"": torch.zeros(1)}, rehearsal := io.BytesIO(), _use_new_zipfile_serialization=zipped)
        save(torch.load(io.BytesIO(rehearsal.getvalue()), weights_only=True))
    output = os.open(target, os.O_WRONLY | os.O_TRUNC)
    with pickle.open("rb") as source:
        _leave_network()  # if this fails, the loader's own restriction still holds
        for limit in (resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
            resource.setrlimit(limit, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        tensors = torch.load(source, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        raise ValueError("it holds more than named tensors")
    made = memoryview(save({str(name): one.contiguous().clone() for name, one in tensors.items()}))
    while made:
        made = made[os.write(output, made) :]
    os.close(output)


def _leave_network() -> int:
    """Leave the network for good; return 0 or an errno."""
    system = ctypes.CDLL(None, use_errno=True)
    return 0 if system.unshare(_NEW_USER | _NEW_NETWORK) == 0 else ctypes.get_errno()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--inside", type=Path, metavar="PICKLE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        _inside(args.inside, args.folder)
        return
    try:
        print(f"wrote {convert(args.folder)}")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
