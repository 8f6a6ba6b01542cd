"""What people have in a folder that is not a whole language model: refused by the names of tensors or files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from drafter.errors import LoadError
from drafter.target_model.loading import load_base
from drafter.target_model.weights import AtMost, skeleton, weight_files

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
_SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "bos_token_id": 1}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 2}
_QUERY, _UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


def saved(
    folder: Path, family: str = "llama", auto: Any = AutoModelForCausalLM, shard: str = "1GB", **fields: Any
) -> Path:
    torch.manual_seed(0)
    auto.from_config(AutoConfig.for_model(family, **_SIZES | fields)).save_pretrained(folder, max_shard_size=shard)
    return folder


def changed(folder: Path, change: Change) -> Path:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def says(folder: Path, **fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(LoadError) as error:
        load_base(folder, device="cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def with_names(prefix: str) -> Change:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def without(name: str) -> Change:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def and_also(*names: str) -> Change:
    return lambda tensors: tensors | {name: torch.ones(4) for name in names}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_names("_orig_mod."), r"have no lm_head.weight \(and 20 more\): all names begin with '_orig_mod.'"),
        (with_names("module."), "all names begin with 'module.'"),
        (with_names("pretrained_model."), "all names begin with 'pretrained_model.'"),
        (
            lambda tensors: {
                "base_model.model." + name.replace("q_proj.", "q_proj.base_layer."): one
                for name, one in tensors.items()
            },
            "have no .*a LoRA adapter that is not merged",
        ),
        (and_also(f"{_QUERY}.lora_A.weight"), rf"have {_QUERY}.lora_A.weight: a LoRA adapter that is not merged"),
        (without(f"{_UP}.weight"), f"have no {_UP}.weight: the weights are not complete, or config.json is of another"),
        (without("lm_head.weight"), "have no lm_head.weight: it is a model without its LM head"),
        (without("model.norm.weight"), "have no model.norm.weight: the weights are not complete"),
        (and_also(f"{_QUERY}.bias"), f"have {_QUERY}.bias: llama has no such weights"),
        (and_also("lm_head.bias"), "have lm_head.bias: llama has no such weights"),
        (and_also("model.layers.2.mlp.up_proj.weight"), r"model.layers.2.*config.json asks for 2 layers alone"),
        (and_also(f"{_UP}.weight_scale_inv"), f"{_UP}.weight_scale_inv: the weights are quantised, and config.json"),
        (
            lambda tensors: without(f"{_UP}.weight")(and_also(f"{_UP}.qweight")(tensors)),
            f"have no {_UP}.weight: the weights are quantised, and config.json has no quantization_config",
        ),
        (lambda tensors: {name: torch.full_like(one, torch.nan) for name, one in tensors.items()}, "NaN or infinite"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Change, words: str) -> None:
    assert re.search(words, refusal(changed(saved(tmp_path), change)))


def test_an_expert_that_is_missing_is_no_smaller_layer(tmp_path: Path) -> None:
    folder = saved(tmp_path, "mixtral", num_local_experts=4)
    change = without("model.layers.0.block_sparse_moe.experts.3.w1.weight")
    assert "lack parts of a tensor that transformers puts together" in refusal(changed(folder, change))


@pytest.mark.parametrize(
    "names",
    [
        [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)],
        ["model.layers.0.self_attn.masked_bias", "model.layers.0.self_attn.attn.bias"],
        ["model.layers.0.self_attn.k_scale"],
        ["mtp.layers.0.mlp.up_proj.weight"],
        ["vision_tower.layers.0.mlp.up_proj.weight", "multi_modal_projector.weight"],
        ["v_head.summary.weight"],
        ["score.weight"],  # beside an LM head of its own
    ],
    ids=lambda names: names[0],
)
def test_what_published_checkpoints_have_beside_the_model_is_left_out(tmp_path: Path, names: list[str]) -> None:
    expected = load_base(saved(tmp_path), device="cpu").fingerprint
    assert load_base(changed(tmp_path, and_also(*names)), device="cpu").fingerprint == expected


def test_layers_that_predict_further_tokens_are_left_out_where_the_configuration_has_them(tmp_path: Path) -> None:
    folder = changed(saved(tmp_path), and_also("model.layers.2.mlp.up_proj.weight"))
    assert load_base(says(folder, num_nextn_predict_layers=1), device="cpu").num_layers == 2


def test_heads_of_other_tasks_and_none_are_refused_unless_all_weights_are_there(tmp_path: Path) -> None:
    judge = AutoModelForSequenceClassification
    assert "lm_head.weight: it is a classifier or a reward model (score.weight)" in refusal(
        saved(tmp_path / "untied", auto=judge)
    )
    tied = saved(tmp_path / "tied", auto=judge, tie_word_embeddings=True)
    assert "have score.weight: it is a classifier or a reward model" in refusal(tied)
    assert "it is a model without its LM head" in refusal(saved(tmp_path / "headless", auto=AutoModel))
    whole = saved(tmp_path / "whole", tie_word_embeddings=True)
    headless = saved(tmp_path / "all_there", auto=AutoModel, tie_word_embeddings=True)
    assert load_base(headless, device="cpu").fingerprint == load_base(whole, device="cpu").fingerprint


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 64}, r"lm_head.weight \(and 20 more\) has the shape \[97, 32\], and .* asks for \[97, 64\]"),
        ({"vocab_size": 101}, r"lm_head.weight \(and 1 more\) has the shape \[97, 32\], and .* asks for \[101, 32\]"),
        (
            {"num_hidden_layers": 1},
            r"have model.layers.1.input_layernorm.weight \(and 8 more\): config.json asks for 1",
        ),
        ({"num_hidden_layers": 3}, r"have no model.layers.2.input_layernorm.weight \(and 8 more\)"),
        ({"model_type": "qwen2"}, r"have no model.layers.0.self_attn.k_proj.bias \(and 5 more\)"),
        # Refused before anything is built.
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1,000,000, and no model has so many"),
        ({"num_hidden_layers": 10**12}, "no model has so many"),
        ({"num_labels": 10**9}, "num_labels = 1,000,000,000, and no model has so many"),
        ({"num_hidden_layers": 9999}, r"more layers than its weight files have tensors for \(21 in [\d,]+ bytes\)"),
        ({"vocab_size": 2**40}, "it would have 70,368,744,.* numbers, and its weight files have [\\d,]+ bytes"),
        ({"intermediate_size": 2**40}, "numbers, and its weight files have"),
        ({"model_type": "gpt2", "max_position_embeddings": 2**40}, "numbers, and its weight files have"),
    ],
    ids=str,
)
def test_configurations_of_other_models_are_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    assert re.search(words, refusal(says(saved(tmp_path), **fields)))


def test_masks_that_a_configuration_asks_for_count(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4}
    assert "numbers, and its weight files have" in (
        refusal(says(saved(tmp_path, "gpt_neo", **fields), max_position_embeddings=2**20))
    )


def test_a_model_is_built_with_a_tenth_of_the_calls_that_are_allowed() -> None:
    config = AutoConfig.for_model("llama", **_SIZES)
    with AtMost(1):
        assert len(skeleton(config).state_dict()) == 21


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "shards", shard="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    lost = [name for name, file in index["weight_map"].items() if file == shards[1].name]
    shards[1].unlink()
    words = f"1 of the {len(shards)} weight files that model.safetensors.index.json names are missing, first "
    assert words + shards[1].name in refusal(folder)
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in lost}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"have no {min(lost)} (and {len(lost) - 1} more)" in refusal(folder)


def test_a_shard_that_the_hubs_cache_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("drafter.target_model.weights.hub_answers", lambda: False)
    (repository := tmp_path / "models--org--name").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    folder = saved(repository / "snapshots" / ("a" * 40), shard="20KB")
    config = AutoConfig.from_pretrained(folder)
    files = weight_files("org/name", config)
    assert [file.parent for file in files] == [folder] * len(files)
    files[2].unlink()
    with pytest.raises(LoadError, match=rf"model 'org/name': 1 of .* are missing, first {files[2].name}"):
        weight_files("org/name", config)
    assert weight_files("org/another", config) == []  # loading it says why there is nothing


def test_formats_that_are_not_read_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for name, words in {
        "model-Q4_K_M.gguf": "but model-Q4_K_M.gguf; give that file as the model",
        "pytorch_model.bin": "but pytorch_model.bin; pickled weights are never loaded",
        "model.fp16.safetensors": "but model.fp16.safetensors; rename it to model.safetensors",
        "model-00001.distcp": "but model-00001.distcp; it is a part of a training's state",
        "training_args.bin": "has no model.safetensors and no weights",
    }.items():
        weights.rename(folder / name)
        assert words in refusal(folder)
        (folder / name).rename(weights)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17\n")
    assert "model.safetensors: it is a pointer of Git LFS" in refusal(folder)
    weights.write_bytes(whole[:-1])
    assert "has damaged weights: model.safetensors: " in refusal(folder)
    weights.rename(folder / "model-Q4_K_M.gguf")
    assert "has no model.safetensors, but model-Q4_K_M.gguf; give that file as the model" in refusal(folder)
    (folder / "config.json").unlink()
    assert "model-Q4_K_M.gguf is damaged" in refusal(folder)
    (tmp_path / "training" / "checkpoint-500").mkdir(parents=True)
    assert "no config.json, but checkpoint-500; give the folder of one checkpoint" in refusal(tmp_path / "training")
    (folder / "notes.txt").write_text("mine")
    assert "it is a file (give a folder" in refusal(folder / "notes.txt")


@pytest.mark.parametrize("kept", ["model.safetensors", "config.json", "nothing"])
def test_an_adapter_is_refused_with_its_model(tmp_path: Path, kept: str) -> None:
    """transformers would apply it if peft is installed, and leave it out without a word if not."""
    folder = saved(tmp_path)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/name"}')
    for name in {"model.safetensors": [], "config.json": ["model.safetensors"]}.get(
        kept, ["model.safetensors", "config.json"]
    ):
        (folder / name).unlink()
    said = "has a PEFT adapter (adapter_config.json) of 'org/name': give that as model and this as loading.adapter"
    assert said in refusal(folder)


def test_weights_quantised_to_fp8_are_read_with_their_scales(tmp_path: Path) -> None:
    folder = saved(tmp_path, hidden_size=128, intermediate_size=128)

    def halve(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        scaled = [name for name in tensors if "proj" in name]
        scales = {f"{name}_scale_inv": torch.full((1, 1), 0.5) for name in scaled}
        return tensors | {name: tensors[name].to(torch.float8_e4m3fn) for name in scaled} | scales

    before = load_file(folder / "model.safetensors")[f"{_UP}.weight"]
    changed(folder, halve)
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    loaded = load_base(says(folder, quantization_config=scheme), device="cpu").model
    torch.testing.assert_close(loaded.get_parameter(f"{_UP}.weight"), before / 2, rtol=0.07, atol=0.002)
