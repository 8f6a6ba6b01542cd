"""A Llama in llama.cpp's form: the order of its rows, and what is in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.peers.workers.llama_gguf import gguf_name, interleaved, tensors, write_gguf
from drafter.target_model.model import BaseModel

MADE = {"heads": st.integers(1, 4), "half": st.integers(1, 8), "position": st.integers(0, 500), "seed": st.integers(0)}


def turned_in_pairs(heads: NDArray[Any], position: int) -> NDArray[Any]:
    """Turn the numbers 2i and 2i + 1 of each head `[heads, d]`, as llama.cpp does."""
    angles = position * 10_000.0 ** (-2 * np.arange(heads.shape[1] // 2) / heads.shape[1])
    pairs = (heads[:, 0::2] + 1j * heads[:, 1::2]) * np.exp(1j * angles)
    return np.stack([pairs.real, pairs.imag], -1).reshape(heads.shape)


def turned_in_halves(heads: NDArray[Any], position: int) -> NDArray[Any]:
    """Turn the heads as transformers does."""
    width = heads.shape[1]
    angles = position * 10_000.0 ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
    both = torch.cat([angles, angles])[None, None]
    given = torch.from_numpy(heads).double()[None, :, None]
    turned, _ = apply_rotary_pos_emb(given, given, both.cos(), both.sin())
    found: NDArray[Any] = turned[0, :, 0].numpy()
    return found


@given(**MADE)
def test_interleaved_rows_turned_in_pairs_are_the_rows_turned_in_halves(
    heads: int, half: int, position: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight, hidden = rng.standard_normal((heads * 2 * half, 5)), rng.standard_normal(5)
    theirs = turned_in_pairs((interleaved(weight, heads) @ hidden).reshape(heads, -1), position)
    ours = turned_in_halves((weight @ hidden).reshape(heads, -1), position)
    assert np.allclose(interleaved(ours.reshape(-1, 1), heads).reshape(heads, -1), theirs)
    assert np.allclose(theirs @ theirs.T, ours @ ours.T)  # so attention's scores are the same


def test_the_rows_of_a_head_of_four() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_read_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    first, second, third = (torch.randn(shape).to(dtype) for shape in ((5, 3), (2, 2), (7,)))
    save_file({"first": first, "second": second}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"third": third}, tmp_path / "model-2.safetensors")
    found = dict(tensors(tmp_path))
    assert list(found) == ["first", "second", "third"]
    assert all(
        np.array_equal(found[name], one.float().numpy())
        for name, one in zip(found, (first, second, third), strict=True)
    )


def test_other_numbers_are_refused(tmp_path: Path) -> None:
    save_file({"first": torch.ones(2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="first is F16"):
        list(tensors(tmp_path))


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_the_file(tiny_base: BaseModel, tmp_path: Path, dtype: str, kind: str) -> None:
    tiny_base.model.save_pretrained(tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf", dtype, [3, 4])
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in read.tensors}
    assert set(found) == {gguf_name(name) for name, _ in tensors(tmp_path)}
    assert found["blk.0.attn_q.weight"].tensor_type.name == kind
    assert found["output_norm.weight"].tensor_type.name == "F32"
    down = tiny_base.model.model.layers[0].mlp.down_proj.weight
    assert list(found["blk.0.ffn_down.weight"].shape) == list(down.shape)[::-1]
    assert read.fields["tokenizer.ggml.eos_token_id"].contents() == 3
    assert read.fields["tokenizer.ggml.eot_token_id"].contents() == 4
    assert not list(tmp_path.glob("*.partial"))


def test_a_weight_that_a_llama_has_not() -> None:
    with pytest.raises(ValueError, match="none of a Llama"):
        gguf_name("model.layers.3.self_attn.q_norm.weight")
