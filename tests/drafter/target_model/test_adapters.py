"""A LoRA adapter's target model is peft's merged one; what does not fit, or is torn, is said."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.drafters.contract import PlainDecoding
from drafter.errors import LoadError
from drafter.heads.checkpoint import is_head_of, load_head, new_head, save_head
from drafter.heads.contract import Provenance
from drafter.requests import Request, SamplingParams
from drafter.target_model.loading import load_base
from tests.support.models import OracleDrafter, generate_reference, random_model, random_prompts, run_engine

peft = pytest.importorskip("peft")
_QUERIES = ["q_proj", "v_proj"]
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    random_model("llama").save_pretrained(folder)
    return folder


def adapter_of(folder: Path, base: Any = None, **settings: Any) -> Path:
    """An adapter with random weights, none of them 0."""
    torch.manual_seed(1)
    fields = {"r": 4, "target_modules": _QUERIES, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | settings
    adapted = peft.get_peft_model(base or random_model("llama"), peft.LoraConfig(**fields))
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name or "lora_magnitude" in name:
            parameter.data.mul_(1.5)
    adapted.save_pretrained(folder)
    return folder


def merged(model: Path, adapter: Path) -> Any:
    base = random_model("llama")
    base.load_state_dict(load_file(model / "model.safetensors"))
    return peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().eval()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "lora_alpha": 16},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}},
        {"modules_to_save": ["lm_head", "norm"]},
        {"target_modules": "all-linear", "layers_to_transform": None},
        {"target_modules": ["embed_tokens", "up_proj"]},
    ],
    ids=lambda settings: ", ".join(settings) or "plain",
)
def test_its_tokens_are_those_of_pefts_merged_model(model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    adapter = adapter_of(tmp_path / "adapter", **settings)
    base = load_base(model, device="cpu", adapter=adapter)
    prompts = random_prompts(4)
    expected = [generate_reference(merged(model, adapter), prompt, 12) for prompt in prompts]
    requests = [Request(prompt, SamplingParams(12, ignore_eos=True)) for prompt in prompts]
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    plain = load_base(model, device="cpu")
    assert [generate_reference(plain.model, prompt, 12) for prompt in prompts] != expected
    for drafter in (PlainDecoding(), OracleDrafter(texts)):
        found = run_engine(base, drafter, requests, max_num_seqs=3, num_draft_tokens=8)
        assert [one.token_ids[: len(text)] for one, text in zip(found, expected, strict=True)] == expected
    assert base.weights == f"float32, with the adapter {adapter} merged"
    assert base.fingerprint != plain.fingerprint
    assert base.fingerprints == {base.fingerprint, plain.fingerprint}


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_were_trained_beside_it_are_the_models(tmp_path: Path, bias: str) -> None:
    """Their names are of base layers, as those of adapted embeddings are."""
    model, adapted = tmp_path / "qwen", random_model("qwen2")
    adapted.save_pretrained(model)
    for layer in adapted.model.layers:
        layer.self_attn.q_proj.bias.data += 1.0
    adapter = adapter_of(tmp_path / "adapter", adapted, bias=bias)
    base, own = load_base(model, device="cpu", adapter=adapter), random_model("qwen2")
    expected = peft.PeftModel.from_pretrained(own, adapter).merge_and_unload().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in base.model.state_dict().items())
    assert bool((expected["model.layers.0.self_attn.q_proj.bias"] > 0.5).all())


def test_a_head_made_for_the_model_drafts_for_the_adapted_one_and_not_the_other_way(
    model: Path, tmp_path: Path
) -> None:
    plain = load_base(model, device="cpu")
    adapted = load_base(model, device="cpu", adapter=adapter_of(tmp_path / "adapter"))
    for name, base in (("plain", plain), ("adapted", adapted)):
        head = new_head("ctc", base, {"num_heads": 2})
        head.provenance = Provenance(base.name, base.fingerprint)
        save_head(head, tmp_path / name)
    assert is_head_of(tmp_path / "plain", adapted)
    provenance = load_head(tmp_path / "plain", adapted).provenance
    assert provenance is not None
    assert provenance.base_fingerprint == plain.fingerprint
    with pytest.raises(LoadError, match="belongs to the target model"):
        load_head(tmp_path / "adapted", plain)


def edited(adapter: Path, **fields: Any) -> None:
    file = adapter / _CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def rewritten(adapter: Path, change: Any) -> None:
    save_file(change(load_file(adapter / _WEIGHTS)), adapter / _WEIGHTS)


def _without_first(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(list(tensors.items())[1:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda adapter: (adapter / _WEIGHTS).unlink(), f"has no {_WEIGHTS}: give the folder that peft saved"),
        (lambda adapter: (adapter / _CONFIG).write_text("{"), f"{_CONFIG} cannot be read"),
        (lambda adapter: (adapter / _WEIGHTS).write_bytes(b"torn"), "cannot be merged into"),
        (
            partial(rewritten, change=_without_first),
            r"has nothing, and the model takes the shape .* the file is torn",
        ),
        (
            partial(rewritten, change=lambda some: some | {"base_model.model.model.layers.9.q": torch.ones(1)}),
            r"layers.9.q its file has the shape \[1\], and the model takes nothing",
        ),
        (
            partial(rewritten, change=lambda some: {name: torch.cat([one, one], 1) for name, one in some.items()}),
            "has the shape .* takes the shape .* or the adapter of another model",
        ),
        (
            partial(rewritten, change=lambda some: {name: one * torch.nan for name, one in some.items()}),
            "cannot be merged into .*NaN",
        ),
        (partial(edited, target_modules=["c_attn"]), "cannot be merged into .*not found in the base model"),
        (partial(edited, peft_type="LOHA"), "is of the type 'LOHA': those of the type LORA are merged"),
        (partial(edited, layer_replication=[[0, 2], [1, 3]]), "repeats layers"),
    ],
)
def test_what_does_not_fit_is_said(model: Path, tmp_path: Path, change: Any, words: str) -> None:
    adapter = adapter_of(tmp_path / "adapter")
    change(adapter)
    with pytest.raises(LoadError, match=words) as error:
        load_base(model, device="cpu", adapter=adapter)
    assert "\n" not in str(error.value)


def test_an_adapter_of_shared_embeddings_is_refused(tmp_path: Path) -> None:
    tied = random_model("llama", tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "tied")
    adapter = adapter_of(tmp_path / "adapter", tied, target_modules=["lm_head"])
    with pytest.raises(LoadError, match="share weights"):
        load_base(tmp_path / "tied", device="cpu", adapter=adapter)


def test_peft_is_asked_for_by_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of(tmp_path / "adapter")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LoadError, match="needs the package peft: pip install peft"):
        load_base(model, device="cpu", adapter=adapter)


def test_no_such_adapter(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="no adapter at 'some/adapter': no such folder, and as a hub id"):
        load_base(model, device="cpu", adapter="some/adapter")
