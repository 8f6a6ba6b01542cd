"""The kernels in Triton's interpreter, beside PyTorch's way; and that they compile for GPUs, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.acceptance.choices import NodeChoices
from drafter.requests import SamplingParams
from drafter.tree.token_tree import TokenTree
from tests.drafter.acceptance.test_choices import PENALTIES, VOCABULARY, packed, sampling_of
from tests.support.properties import examples

# Triton asks the environment when it is imported, which PyTorch may do in any test of a process.
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="make test-triton runs it")

SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.3, "top_k": 3},
    {"temperature": 1.7, "top_p": 0.6},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 500, "top_p": 1e-9},
]


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The module, with rows of several blocks."""
    from drafter.acceptance import triton_choice

    with mock.patch.object(triton_choice, "_PORTION", 16), mock.patch.object(triton_choice, "_BLOCK", 32):
        yield triton_choice


def a_tree(rows: int, vocabulary: int, random: torch.Generator) -> TokenTree:
    """Root 0 with children 1 and 2, 3 below 1, and padding."""
    tokens = torch.randint(0, vocabulary, (rows, 5), generator=random)
    tokens[:, 4] = -1
    parents, depths = torch.tensor([0, 0, 0, 1, 0]), torch.tensor([0, 1, 1, 2, 1])
    return TokenTree(tokens, parents.expand(rows, -1), depths.expand(rows, -1), torch.zeros(rows, 5))


@examples(60)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.integers(1, 90),
    rows=st.integers(1, 4),
    ties=st.booleans(),
    guided=st.booleans(),
    kinds=st.sampled_from([PENALTIES, SAMPLED, [*PENALTIES, *SAMPLED]]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_kernels_choose_as_pytorch_does(
    kernels: ModuleType,
    seed: int,
    vocabulary: int,
    rows: int,
    ties: bool,
    guided: bool,
    kinds: list[dict[str, object]],
    dtype: torch.dtype,
) -> None:
    random = torch.Generator().manual_seed(seed)
    vocabulary = vocabulary if kinds is SAMPLED else VOCABULARY
    params = [SamplingParams(seed=seed + row, **kinds[(seed + row) % len(kinds)]) for row in range(rows)]  # type: ignore[arg-type]
    lengths = torch.randint(1, 9, (rows,), generator=random).tolist()
    texts = [torch.randint(0, min(vocabulary, 8), (n,), generator=random).tolist() for n in lengths]
    sampling = sampling_of(params, texts, [int(torch.randint(1, n + 1, (1,), generator=random)) for n in lengths])
    logits = torch.randn(rows, 5, vocabulary, generator=random) * 4
    logits = (logits.round() if ties else logits).to(dtype)
    allowed = packed(torch.rand(logits.shape, generator=random) < 0.5) if guided else None
    tree = a_tree(rows, min(vocabulary, 8), random)
    nodes = torch.randint(0, 4, (rows,), generator=random)
    choices = NodeChoices(logits, tree, tree.ancestors(), sampling, allowed)
    expected = choices.at(torch.arange(rows), nodes)
    choices.kernels = kernels
    assert choices.at(torch.arange(rows), nodes).tolist() == expected.tolist()


def test_a_row_that_is_not_finite_ends_and_changes_no_other(kernels: ModuleType) -> None:
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 5, 40, generator=random)
    logits[1, 0, 7], logits[2, 0] = torch.nan, torch.nan
    logits[3, 0, 3], logits[4, 0] = torch.inf, -torch.inf
    sampling = sampling_of([SamplingParams(temperature=1.0, top_p=0.8, top_k=9, seed=4)] * 5, [[1]] * 5, [1] * 5)
    tree = a_tree(5, 8, random)
    choices = NodeChoices(logits, tree, tree.ancestors(), sampling)
    expected = choices.at(torch.arange(5), torch.zeros(5, dtype=torch.long))
    choices.kernels = kernels
    found = choices.at(torch.arange(5), torch.zeros(5, dtype=torch.long))
    assert found[0] == expected[0]
    assert ((found >= 0) & (found < 40)).all()


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernels_compile_for_a_gpu(architecture: int) -> None:
    """In a process whose kernels are not the interpreter's."""
    command = [sys.executable, "-m", "tests.support.gpu_kernels", str(architecture)]
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=without, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["_score", "_score", "_choose"]
