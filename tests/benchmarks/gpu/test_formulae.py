"""What steps of real sizes read, run and take, counted on tensors that have no numbers, beside the formulae."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch

from benchmarks.gpu import formulae
from benchmarks.gpu.formulae import NO_DRAFT, DraftWork, sampling_bytes, step_bytes, step_kernels
from benchmarks.gpu.operation_counts import OperationCounts, Result
from drafter.acceptance.sampling import INTERVALS, PASSES, least_reaching
from drafter.ctc.lattice import LATTICE_BEAM
from drafter.drafters.contract import Drafter, PlainDecoding
from drafter.heads.checkpoint import new_head
from drafter.heads.contract import DraftHead
from drafter.methods.ngram.drafter import NgramDrafter
from drafter.requests import SamplingParams
from drafter.target_model.attention import parts_of
from drafter.target_model.model import BaseModel
from recipes.paper.base_sizes import BaseSizes
from tests.support.fake_gpus import base_of_shape, fake_gpus, move_to_gpus
from tests.support.fake_steps import LLAMA_1B, LLAMA_8B, FakeStep, on_gpu
from tests.support.marks import slow_but
from tests.support.paths import ROOT

CTC = {"num_heads": 32, "intermediate_size": 8192}
HEADS = {"ctc": ("ctc", CTC), "ctc lattice": ("ctc", {**CTC, "label_context": 2}), "medusa": ("medusa", {})}
SHAPES = {"1B": LLAMA_1B, "8B": LLAMA_8B}
ROWS = ((1, 8192), (64, 2048), (256, 2048))
"""Rows, and positions of each, of the steps."""
NODES = 15


def counted(shape: str, name: str, rows: int, length: int) -> tuple[OperationCounts, DraftWork, int]:
    """Counts of a greedy step, what the formulae say of its drafter, and the drafter's depth."""
    base = base_of_shape(SHAPES[shape])
    algorithm, settings = HEADS.get(name, ("medusa", {}))
    with torch.device("meta"):
        head = new_head(algorithm, base, settings).to(base.dtype).eval().requires_grad_(False)
    with fake_gpus(), torch.inference_mode():
        move_to_gpus(base, 1)
        on_gpu(head, base.device)
        drafter: Drafter = PlainDecoding() if name == "none" else NgramDrafter(NODES)
        if name in HEADS:
            drafter = head.drafter(base, NODES)
        nodes, depth = min(NODES, drafter.spec.max_nodes), drafter.spec.max_depth
        return FakeStep(base, drafter, rows, nodes, length).counted(), work_of(name, base, head, depth), depth


def work_of(name: str, base: BaseModel, head: DraftHead, depth: int) -> DraftWork:
    """What the formulae say of drafting."""
    weights, config = sum(parameter.nbytes for parameter in head.parameters()), head.config
    context = 2 * base.hidden_size * base.dtype.itemsize
    match name:
        case "none":
            return NO_DRAFT
        case "ngram":
            return formulae.ngram(depth)
        case "ctc":
            return formulae.ctc_prefix(weights, context, config.num_frames, depth)
        case "ctc lattice":
            factor = (config.joint_size + 1) * base.vocab_size * base.dtype.itemsize
            return formulae.ctc_lattice(weights, context, config.band, LATTICE_BEAM, depth, factor)
        case _:
            return formulae.medusa(weights, depth)


CASES = [(shape, name, rows) for shape in SHAPES for name in ("none", "ngram", *HEADS) for rows in ROWS]
FAST = [("1B", "none", ROWS[0]), ("1B", "ngram", ROWS[1]), ("1B", "ctc lattice", ROWS[1])]


@pytest.mark.parametrize("case", slow_but(FAST, CASES), ids=str)
def test_a_step_reads_and_runs_what_the_formulae_say(case: tuple[str, str, tuple[int, int]]) -> None:
    shape, name, (rows, length) = case
    counts, work, depth = counted(shape, name, rows, length)
    sizes, nodes = BaseSizes.of(SHAPES[shape], torch.bfloat16), 1 if name == "none" else NODES + 1
    expected = step_bytes(sizes, rows, nodes, length, depth, work)
    assert counts.bytes_read == pytest.approx(expected.total, rel=0.1), expected
    shared = SHAPES[shape].num_key_value_heads
    parts = parts_of(rows, shared, nodes * sizes.queries // sizes.keys, length) > 1
    assert counts.num_kernels == pytest.approx(step_kernels(sizes, nodes, work, parts=parts), rel=0.02)
    # Committed positions are read by one kernel a layer, which stops at each row's end.
    assert counts.kernels["_flash_attention_forward"] == sizes.layers + (name.startswith("ctc"))
    # Nothing is as large as the keys would be if each query head had its own, and no logits are in double precision.
    keys_by_head, logits = rows * length * sizes.queries, rows * nodes * sizes.vocabulary
    for one in counts.results:
        assert one.numel < keys_by_head or one.numel == logits, one
        assert one.dtype != torch.float64 or nodes == 1 or one.numel < logits, one
    # What a step takes for a while: the logits, and what the draft makes of its distributions.
    drafted = rows * work.states * sizes.vocabulary
    assert counts.peak_bytes < 2 * (logits * sizes.itemsize + 2 * rows * length * 64) + 12 * drafted + (1 << 26)


@pytest.mark.parametrize("rows", slow_but([64], [64, 256]))
def test_no_choice_of_a_token_needs_all_nodes_in_double_precision(rows: int) -> None:
    base = base_of_shape(LLAMA_1B)
    sampling = SamplingParams(temperature=0.8, repetition_penalty=1.1)
    with fake_gpus(), torch.inference_mode():
        move_to_gpus(base, 1)
        counts = FakeStep(base, NgramDrafter(NODES, depth=2), rows, NODES, 2048, sampling).counted()
    double = [one.numel for one in counts.results if one.dtype == torch.float64]
    assert max(double) == rows * base.vocab_size


SAMPLED = {
    "draw": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=0.8, top_k=9),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "min-p": SamplingParams(temperature=0.8, min_p=0.1),
}


@pytest.mark.parametrize("name", slow_but(["top-p"], list(SAMPLED)))
def test_sampling_reads_what_the_formulae_say(name: str) -> None:
    rows, depth, sizes = 64, 8, BaseSizes.of(LLAMA_1B, torch.bfloat16)

    def bytes_read(sampling: SamplingParams) -> int:
        base = base_of_shape(LLAMA_1B)
        with fake_gpus(), torch.inference_mode():
            move_to_gpus(base, 1)
            return FakeStep(base, NgramDrafter(NODES, depth=depth), rows, NODES, 2048, sampling).counted().bytes_read

    expected = sampling_bytes(sizes, rows, depth)
    beside = bytes_read(SAMPLED[name]) - bytes_read(SamplingParams() if name == "draw" else SAMPLED["draw"])
    assert beside == pytest.approx(expected[name], rel=0.1)


def test_the_documentation_has_the_formulae() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").split("## What a step reads and runs")[1]
    lines = [line.split(" = ") for block in text.split("```")[1:6:2] for line in block.strip().splitlines()]
    written = {name.strip(): formula.replace("·", "*").replace("÷", "/").replace(",", "") for name, formula in lines}
    sizes, rows, nodes, length, depth = BaseSizes.of(LLAMA_8B, torch.bfloat16), 3, 16, 500, 6
    names = dict(zip("LdiqkVs", astuple(sizes), strict=True)) | {"B": rows, "N": nodes, "S": length, "D": depth}
    names |= {"drafting": formulae.ngram(depth).kernels}
    expected = vars(step_bytes(sizes, rows, nodes, length, depth, NO_DRAFT)) | {
        "kernels": step_kernels(sizes, nodes, formulae.ngram(depth)),
        "plain": step_kernels(sizes, 1, NO_DRAFT),
        **sampling_bytes(sizes, rows, depth),
    }
    assert {name: eval(formula, names) for name, formula in written.items()} == {
        name: value for name, value in expected.items() if name != "draft"
    }


def test_views_are_no_kernels_and_choosing_reads_what_is_chosen() -> None:
    table, chosen = torch.zeros(100, 8), torch.tensor([3, 4])
    with OperationCounts() as counts, torch.inference_mode():
        rows = table.index_select(0, chosen)
        rows.view(16)[:4].unsqueeze(0).transpose(0, 1)
        rows.add_(table[:1].expand(2, 8))
        del rows
        torch.zeros(50, dtype=torch.float64)
    assert counts.kernels == {"index_select": 1, "add_": 1, "zeros": 1}
    assert counts.bytes_read == (2 * 8 * 4 + 2 * 8) + (2 * 8 * 4 + 8 * 4)
    assert counts.results == [
        Result("index_select", (2, 8), torch.float32),
        Result("zeros", (50,), torch.float64),
    ]
    assert counts.peak_bytes == 50 * 8


def test_a_threshold_reads_all_numbers_a_few_times() -> None:
    numbers = torch.arange(100_000)[None]
    with OperationCounts() as counts, torch.inference_mode():
        least_reaching(numbers, torch.ones(1, 1, dtype=torch.long).expand_as(numbers), torch.tensor([[500]]))
    # Each pass takes from the numbers, shifts, bounds and counts them; then it looks at its intervals.
    assert counts.bytes_read <= PASSES * 4 * numbers.nbytes + 25 * (INTERVALS + 2 * PASSES) + 1000
