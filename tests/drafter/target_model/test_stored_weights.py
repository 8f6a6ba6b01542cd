"""A GGUF file's weights stay as they are stored, and the tokens are those of the dequantised model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from drafter.errors import LoadError
from drafter.native import coded
from drafter.requests import Request, SamplingParams
from drafter.target_model.architecture import transformers_loading
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.target_model.new_weights import match_weights
from drafter.target_model.stored_weights import CodedWeight
from tests.support.models import (
    OracleDrafter,
    generate_reference,
    plainly,
    random_prompts,
    run_engine,
    texts_of,
    tokens_of,
)

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
from tests.support.gguf_files import tiny_llama, write_gguf  # noqa: E402

Q = gguf.GGMLQuantizationType
MIXED = {"token_embd": Q.Q8_0, "attn_v": Q.Q6_K, "attn_": Q.Q4_K, "ffn_down": Q.Q6_K, "ffn_": Q.Q5_K}
"""As llama.cpp mixes formats: values have more bits than queries and keys."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(tiny_llama(hidden_size=256, intermediate_size=256), file, MIXED)
    return file


@pytest.fixture(scope="module")
def dense(file: Path) -> Any:
    with transformers_loading():
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def float_matrices(base: BaseModel) -> list[str]:
    return [name for name, one in base.model.named_parameters() if one.dim() > 1 and not isinstance(one, CodedWeight)]


def test_tokens_are_those_of_the_dequantised_model_and_no_weight_is_held_twice(file: Path, dense: Any) -> None:
    base = load_base(file, device="cpu")
    assert (base.weights, base.executor_name, float_matrices(base)) == ("GGUF, as stored", "NativeDecoder", [])
    prompts = random_prompts(6)
    requests = [
        Request(prompt, SamplingParams(12, temperature=temperature, seed=row, ignore_eos=True))
        for temperature in (0.0, 1.0)
        for row, prompt in enumerate(prompts)
    ]
    plain = plainly(base, requests)
    assert tokens_of(plain)[:6] == [generate_reference(dense, prompt, 12) for prompt in prompts]
    floats = load_base(file, device="cpu", dequantize=True)
    assert floats.fingerprint == base.fingerprint
    assert tokens_of(plainly(floats, requests)) == tokens_of(plain)
    drafted = run_engine(base, OracleDrafter(texts_of(requests, plain)), requests, max_num_seqs=5, num_draft_tokens=8)
    assert tokens_of(drafted) == tokens_of(plain)


def test_whatever_else_asks_gets_the_same_numbers(file: Path, dense: Any) -> None:
    """Draft heads ask for embeddings, and for the LM head with gradients or without; the model's own code for all."""
    base = load_base(file, device="cpu")
    weights = dense.state_dict()
    for name, weight in base.model.state_dict().items():
        assert torch.equal(weight + 0, weights[name]), name
    ids = torch.tensor([[3, 200], [0, 3]])
    with torch.no_grad():
        torch.testing.assert_close(base.model(input_ids=ids).logits, dense(input_ids=ids).logits)
    embeddings = weights["model.embed_tokens.weight"]
    assert torch.equal(base.embed(ids), embeddings[ids])
    assert torch.equal(base.lm_head_weight[ids[0]], embeddings[ids[0]])
    states = torch.randn(5, 256, requires_grad=True)
    expected = F.linear(states, embeddings)
    with torch.no_grad():
        torch.testing.assert_close(base.lm_head(states), expected)
    base.lm_head(states).sum().backward()
    torch.testing.assert_close(states.grad, embeddings.sum(0).expand(5, -1), rtol=1e-4, atol=1e-4)
    base.leave_native()
    assert {type(one) for one in base.model.parameters()} == {torch.nn.Parameter}
    assert base.model.lm_head.weight is base.model.model.embed_tokens.weight
    assert all(torch.equal(one, weights[name]) for name, one in base.model.state_dict().items())


def test_weights_change_only_where_they_are_dequantised(file: Path, dense: Any) -> None:
    base = load_base(file, device="cpu")
    with pytest.raises(LoadError, match=r"its weights are quantised.*load it dequantised"):
        match_weights("m", base.model, dense.named_parameters())
    with pytest.raises(RuntimeError, match="as their file stores them, and cannot be changed"):
        base.lm_head_weight.mul_(2)
    assert len(match_weights("m", load_base(file, device="cpu", dequantize=True).model, dense.named_parameters())) == 20


def test_a_layout_that_stands_for_other_numbers_is_refused(
    file: Path, dense: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers in that format are kept in fp32, and tokens are right."""
    take = coded.FORMATS[14].take
    wrong = coded.FORMATS[14]._replace(take=lambda blocks: take(blocks)._replace(codes=take(blocks).codes[:, ::-1]))
    monkeypatch.setitem(coded.FORMATS, 14, wrong)
    base = load_base(file, device="cpu")
    assert "would stand for other numbers" in caplog.text
    assert (base.weights, base.executor_name) == ("GGUF, partly as stored", "NativeDecoder")
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"]  # one matrix: q, k and v
    assert float_matrices(base) == [f"model.layers.{number}.{one}.weight" for number in (0, 1) for one in layer]
    (found,) = plainly(base, [Request([5, 9, 3], SamplingParams(12, ignore_eos=True))])
    assert found.token_ids == generate_reference(dense, [5, 9, 3], 12)
