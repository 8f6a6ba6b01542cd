"""Compiles the kernels of a choice for a GPU that need not be there, and prints their names."""

from __future__ import annotations

import sys
from typing import Any

from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from drafter.acceptance import triton_choice

_FLOATS = "biases seen said repetition frequency presence scores temperatures top_ps log_min_ps"
_POINTERS = dict.fromkeys(_FLOATS.split(), "*fp64") | dict.fromkeys(("ancestors", "real", "in_output", "may"), "*i1")
_NUMBERS = dict.fromkeys(("size", "tree_size", "num_biases", "num_banned", "num_words"), "i32") | {"scale": "fp64"}


def compile_for(architecture: int, kernel: Any, constants: dict[str, int], logits: str = "") -> None:
    types = {"logits": logits, "found": "*fp64", "allowed": "*i32"} | _POINTERS | _NUMBERS
    signature = {name: types.get(name, "*i64") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled(ASTSource(kernel, signature, constexprs=places), target=GPUTarget("cuda", architecture, 32))
    print(kernel.__name__)


if __name__ == "__main__":
    for logits, stages in (("*bf16", 1), ("*fp32", 0)):
        constants = {"penalised": stages, "listed": stages, "guided": stages, "block": triton_choice._PORTION}
        compile_for(int(sys.argv[1]), triton_choice._score, constants, logits)
    compile_for(int(sys.argv[1]), triton_choice._choose, {"size": 128_256, "block": triton_choice._BLOCK})
