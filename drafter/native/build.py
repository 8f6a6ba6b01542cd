"""The C++ library for CPUs: compiled for this machine's processor once and cached, and its `ctypes` bindings."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.devices import Pieces

_SOURCES = Path(__file__).parent / "source"
_FLAGS = ("-std=c++17", "-O2", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-Wall", "-Wextra")
_COMPILERS = ("c++", "g++", "clang++")
_COMPILER_TIMEOUT = 300.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
Pointer = ctypes.c_void_p
_I64, _I32, _F32 = ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class BuildError(Exception):
    """The library cannot be compiled here; the message says why."""


def library_path() -> Path:
    """Return the compiled library, after compiling it if the cache does not have it; raise `BuildError` if it cannot.

    The cache is `drafter` in `$XDG_CACHE_HOME`, or in `~/.cache`. A library that another user may have put there is not
    used but replaced; where the folder is another user's or cannot be made, one of this user's own in `/tmp` is used.
    """
    compiler = _compiler()
    cached = _folder() / f"native-{_digest(compiler)}.so"
    if not (stat.S_ISREG(_mode(cached)) and _only_ours(cached)):
        _compile(compiler, cached)
    return cached


def _folder() -> Path:
    wanted, private = cache_folder(), _private_folder()
    problem = f"other users can change {wanted} and {private}: set XDG_CACHE_HOME to a folder of your own"
    for folder in (wanted, private):
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:  # the home of a user that a container does not know is /
            problem = f"the compiled library cannot be kept in {folder}: {error}"
        if stat.S_ISDIR(_mode(folder)):
            if folder.stat().st_uid == os.geteuid():  # a mask may have given it to a group
                folder.chmod(folder.stat().st_mode & ~_OTHERS_WRITE)
            if _only_ours(folder):
                return folder
    raise BuildError(problem)


def _private_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"drafter-{os.geteuid()}"


def _mode(path: Path) -> int:
    """Return a file's mode, a link's own; 0 where there is nothing."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _only_ours(path: Path) -> bool:
    """Return whether nobody but this user and the administrator can change a file, or the entries of a folder."""
    status = path.lstat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_WRITE


def _compiler() -> str:
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise BuildError(f"there is no C++ compiler ({', '.join(wanted)})")


def cache_folder() -> Path:
    """Return the folder of what this machine keeps between processes."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafter"
    except RuntimeError:  # a user without a home
        return _private_folder()


def _digest(compiler: str) -> str:
    digest = hashlib.sha256(" ".join([compiler, *_FLAGS, processor()]).encode())
    digest.update(str(Path(compiler).resolve().stat().st_mtime_ns).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def processor() -> str:
    """Return a description that differs for processors with different instructions under `-march=native`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(compiler: str, target: Path) -> None:
    # PyTorch's own OpenMP, so that the process has one: its file has the name that the linker looks for.
    libraries = Path(torch.__file__).parent / "lib"
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            sources = [str(source) for source in sorted(_SOURCES.glob("*.cpp"))]
            command = [compiler, *_FLAGS, *sources, f"-L{libraries}", "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT, check=False)
            if done.returncode != 0:
                raise BuildError(f"{compiler} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
            made.chmod(0o755)  # whatever this user's mask lets others do
            made.replace(target)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {_COMPILER_TIMEOUT:.0f} s") from error
    except OSError as error:
        raise BuildError(f"the compiled library cannot be kept in {target.parent}: {error}") from error


def fields(*kinds: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Return fields for ctypes: for each kind, its names in one text."""
    return [(name, kind) for kind, names in kinds for name in names.split()]


# Structures of the same names, without `Struct`, in `source/`.


class MatrixStruct(ctypes.Structure):
    _fields_ = fields((Pointer, "weights bias"), (_I64, "inputs outputs"), (_I32, "half coded"))


class CodedBlockStruct(ctypes.Structure):
    _fields_ = fields((Pointer, "codes"), (_I64, "format"))


class ExpertsStruct(ctypes.Structure):
    _fields_ = fields((MatrixStruct, "router"), (ctypes.POINTER(MatrixStruct), "gate_up down"), (_I64, "taken normed"))


class LayerStruct(ctypes.Structure):
    _fields_ = fields(
        (Pointer, "attention_norm mlp_norm attention_after mlp_after query_norm key_norm cosines sines"),
        (_I64, "window"),
        (ctypes.POINTER(ExpertsStruct), "experts"),
        (Pointer, "mixer"),
        (MatrixStruct, "qkv output gate_up down"),
    )


class DecoderStruct(ctypes.Structure):
    _fields_ = fields(
        (ctypes.POINTER(LayerStruct), "layers"),
        (Pointer, "embedding final_norm"),
        (MatrixStruct, "head table"),
        (_I64, "positions hidden heads kv_heads head_size rotated vocabulary joint_heads gated"),
        (_F32, "epsilon scale score_cap embedding_scale residual_scale logit_scale logit_cap"),
        (_I32, "gate"),
    )


class ForwardStruct(ctypes.Structure):
    _fields_ = fields(
        (ctypes.POINTER(Pointer), "keys values"),
        (Pointer, "texts states"),
        (ctypes.POINTER(Pointer), "kept"),
        (Pointer, "blocks"),
        (_I64, "block slot_blocks first_slot rows nodes"),
        (Pointer, "tokens lengths positions ancestors which"),
        (_I64, "count"),
        (Pointer, "taps"),
        (_I64, "tap_count"),
        (Pointer, "hidden logits"),
        (_I64, "logits_from layers threads"),
    )


class JointLayerStruct(ctypes.Structure):
    _fields_ = fields((Pointer, "norm_weight norm_bias"), (MatrixStruct, "inner out"))


class JointStruct(ctypes.Structure):
    _fields_ = fields(
        (MatrixStruct, "frames out"),
        (ctypes.POINTER(JointLayerStruct), "layers"),
        (Pointer, "norm_weight norm_bias blank_weight blank_bias"),
        (MatrixStruct, "head"),
        (_I64, "layer_count terms hidden"),
    )


class LabelTableStruct(ctypes.Structure):
    _fields_ = fields((Pointer, "drafted recent"), (_I64, "places tokens texts"))


class SearchStruct(ctypes.Structure):
    _fields_ = fields(
        (LabelTableStruct, "labels"),
        (Pointer, "states"),
        (_I64, "rows frames band depth size beam"),
        (_F32, "least unused"),
        (Pointer, "pending tokens parents depths log_probs"),
        (_I64, "threads"),
    )


class LayerNormStruct(ctypes.Structure):
    _fields_ = fields((Pointer, "weight bias"))


class FrameLayerStruct(ctypes.Structure):
    _fields_ = fields((LayerNormStruct, "attention_norm mlp_norm"), (MatrixStruct, "qkv output gate_up down"))


class FrameLayersStruct(ctypes.Structure):
    _fields_ = fields(
        (ctypes.POINTER(FrameLayerStruct), "layers"),
        (LayerNormStruct, "embedding_norm hidden_norm"),
        (MatrixStruct, "fusion"),
        (Pointer, "slots cosines sines"),
        (_I64, "layer_count width heads head_size intermediate"),
        (_F32, "scale unused"),
    )


class FramesStruct(ctypes.Structure):
    _fields_ = fields(
        (Pointer, "cache"),
        (_I64, "slots length"),
        (Pointer, "embeddings hidden"),
        (_I64, "hidden_stride"),
        (Pointer, "slot position"),
        (_I64, "entries"),
        (Pointer, "ends"),
        (_I64, "rows frames"),
        (Pointer, "states"),
        (_I64, "threads"),
    )


@cache
def library() -> ctypes.CDLL:
    """Load the library, once per process; compile it if the cache has none, or raise `BuildError`."""
    return declared(
        ctypes.CDLL(str(library_path())),
        ("lanes", _I64, []),
        ("takes_heads_of", _I32, [_I64]),
        ("packed_bytes", _I64, [_I64, _I64, _I32]),
        ("coded_bytes", _I64, [_I64, _I64]),
        ("lay_out", None, [_I64, _I64, Pointer, _I64, Pointer, Pointer, Pointer, Pointer]),
        ("expand", None, [ctypes.POINTER(MatrixStruct), Pointer, _I64, Pointer]),
        ("multiply", None, [ctypes.POINTER(MatrixStruct), Pointer, _I64, Pointer, _I64]),
        ("pack", None, [Pointer, _I64, Pointer, _I64, _I32, Pointer]),
        ("forward", _I32, [ctypes.POINTER(DecoderStruct), ctypes.POINTER(ForwardStruct)]),
        ("search", None, [ctypes.POINTER(JointStruct), ctypes.POINTER(SearchStruct)]),
        ("frames", None, [ctypes.POINTER(FrameLayersStruct), ctypes.POINTER(FramesStruct)]),
    )


def declared(loaded: ctypes.CDLL, *functions: tuple[str, Any, list[Any]]) -> ctypes.CDLL:
    """Return the library with functions declared: the name behind `drafter_`, the result, and the arguments."""
    for name, result, arguments in functions:
        function = getattr(loaded, f"drafter_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


class UnsuitableError(Exception):
    """The library cannot compute with these weights; the message says why."""


def _suitable(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
        raise UnsuitableError(f"it has {tensor.dtype} on {tensor.device}, not float32 on a CPU")
    return tensor.detach().contiguous()


PIECES = Pieces()


class PackedMatrix:
    """Weights of a linear layer, packed for the library, in bf16 if they are exact in it: half of the bytes to read.

    Args:
        weight: `[outputs, inputs]` fp32 on a CPU.
        bias: `[outputs]`.
        order: Output of each column, -1 for none; by default all outputs in their order.

    Raises:
        UnsuitableError: The weights are of another kind.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, order: Tensor | None = None) -> None:
        weight = _suitable(weight)
        outputs, self.inputs = weight.shape
        order = torch.arange(outputs) if order is None else order.contiguous()
        self.outputs = len(order)
        # The weights of two inputs are stored together.
        self.half = self.inputs % 2 == 0 and torch.equal(weight.bfloat16().float(), weight)
        size = library().drafter_packed_bytes(self.outputs, self.inputs, self.half)
        self._packed = PIECES.take(size)
        library().drafter_pack(
            weight.data_ptr(), self.inputs, order.data_ptr(), self.outputs, self.half, self._packed.data_ptr()
        )
        self._bias = None if bias is None else columns_of(bias, order)

    def struct(self) -> MatrixStruct:
        """Return the library's view, valid as long as this object lives."""
        bias = None if self._bias is None else self._bias.data_ptr()
        return MatrixStruct(self._packed.data_ptr(), bias, self.inputs, self.outputs, self.half, 0)


def columns_of(bias: Tensor, order: Tensor) -> Tensor:
    """Return a bias in the order of columns, and zeros up to a whole block of outputs."""
    width = 2 * library().drafter_lanes()
    columns = torch.zeros(-(-len(order) // width) * width, dtype=torch.float32)
    columns[: len(order)] = torch.where(order >= 0, _suitable(bias)[order.clamp_min(0)], 0)
    return columns


def gated_order(size: int) -> Tensor:
    """Return the column order in which blocks of a gate alternate with those of its `size` gated outputs."""
    lanes = library().drafter_lanes()
    columns = torch.arange(-(-size // lanes) * lanes).view(-1, 1, lanes)
    both = torch.cat([columns, columns + size], 1)
    return torch.where(columns < size, both, -1).flatten()


class PackedWeights:
    """Keeps weights alive for the library. Methods raise what `PackedMatrix` does."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def matrix(self, weight: Tensor, bias: Tensor | None = None, order: Tensor | None = None) -> MatrixStruct:
        packed = PackedMatrix(weight, bias, order)
        self.keep(packed)
        return packed.struct()

    def keep(self, one: object) -> None:
        """Keep an object whose memory the library reads."""
        self._kept.append(one)

    def gated(self, weight: Tensor, bias: Tensor | None = None) -> MatrixStruct:
        """Pack the first matrix `[2 m, d]` of a gated MLP, whose first half is the gate."""
        return self.matrix(weight, bias, gated_order(len(weight) // 2))

    def after_gate(self, weight: Tensor, bias: Tensor | None = None) -> MatrixStruct:
        """Pack the second matrix `[d, m]` of a gated MLP, with zero inputs up to whole vectors."""
        return self.matrix(F.pad(weight, (0, -weight.shape[1] % library().drafter_lanes())), bias)

    def address(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor's data; None for None."""
        if tensor is None:
            return None
        tensor = _suitable(tensor)
        self.keep(tensor)
        return tensor.data_ptr()


def main() -> None:
    """Compile in advance; print the library's path, or why there is none."""
    try:
        print(f"native library: {library_path()}")
    except BuildError as error:
        print(f"no native library: {error}")


if __name__ == "__main__":
    main()
