from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from drafter.errors import LoadError
from drafter.requests import Request, SamplingParams
from drafter.target_model.architecture import fingerprint, lengths_beyond, small_config
from drafter.target_model.loading import load_base, pick_device, pick_dtype, require_data
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.text.tokenizers import load_tokenizer
from tests.support.caches import kv_of
from tests.support.fake_gpus import fake_gpus, move_to_gpus
from tests.support.models import OracleDrafter, generate_reference, random_model, run_engine, tokens_of


def build(family: str, auto: Any = AutoModelForCausalLM, **fields: Any) -> Any:
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(family, **fields))


_SMALL = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        (
            "rwkv",
            {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 50},
            "rwkv keeps a recurrent state .*; the engine .* with or without a drafter: use transformers' generate",
        ),
        ("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}, "bloom has ALiBi, which counts"),
        ("mpt", {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 50}, "mpt has ALiBi"),
        (
            "falcon",
            {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": True},
            "falcon has ALi",
        ),
        (
            "bert",
            {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50},
            "bert reads in both directions, as encoders do",
        ),
        ("openai-gpt", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}, "openai-gpt has no KV cache"),
        (
            "lfm2",
            _SMALL
            | {
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "layer_types": ["indexed_attention", "full_attention"],
            },
            "lfm2 has indexed_attention layers; the engine",
        ),
    ],
)
def test_unsuitable_architectures_are_refused_by_name(family: str, fields: dict[str, Any], reason: str) -> None:
    model = build(family, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # otherwise hardly any token depends on another
    with pytest.raises(LoadError, match=reason):
        BaseModel(model)


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        # Their own windows are counted from the end of the longest row.
        (
            "gpt_neo",
            {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 256},
            "gpt_neo gives other logits .* longer than window_size 256, tried on a small copy",
        ),
        (
            "doge",
            {"num_hidden_layers": 2, "intermediate_size": 48, "num_key_value_heads": 2, "keep_window_size": 300},
            "doge gives other logits .* keep_window_size 300",
        ),
        ("gpt_neo", {"num_layers": 2, "num_heads": 4, "window_size": 8}, "gpt_neo gives other logits"),
        # One row works, two of different lengths do not.
        ("gpt_neox_japanese", {"num_hidden_layers": 2}, "gpt_neox_japanese does not run .*view size is not compatible"),
    ],
)
def test_windows_and_rows_that_a_model_does_not_keep_apart_are_found(
    family: str, fields: dict[str, Any], reason: str
) -> None:
    if family == "gpt_neo":
        fields = {"attention_types": [[["global", "local"], 1]], **fields}
    with pytest.raises(LoadError, match=reason):
        BaseModel(build(family, **_SMALL | fields))


@pytest.mark.parametrize("positions", [128, 512])
def test_a_model_whose_masks_end_where_draft_trees_go_on_is_found(positions: int) -> None:
    """Its windows are not shorter than its positions; a second proof, or one on a small copy, goes to the last."""
    sizes = {"num_layers": 2, "num_heads": 4, "window_size": positions, "max_position_embeddings": positions}
    with pytest.raises(LoadError, match=r"gpt_neo does not run .* so it is at its last positions, past which draft"):
        BaseModel(build("gpt_neo", **_SMALL | sizes, attention_types=[[["global", "local"], 1]]))


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_draft_trees_go_past_the_last_position_and_texts_end_there(family: str) -> None:
    model = random_model(family)
    model.generation_config.eos_token_id = None
    base = BaseModel(model)
    assert base.max_positions is not None
    prompts = [list(range(3, 94)) + [5] * 29, [7, 8, 9]]
    room = [base.max_positions - len(prompt) for prompt in prompts]
    expected = [generate_reference(model, prompt, new) for prompt, new in zip(prompts, room, strict=True)]
    requests = [Request(one, SamplingParams(new, ignore_eos=True)) for one, new in zip(prompts, room, strict=True)]
    drafter = OracleDrafter([prompt + text for prompt, text in zip(prompts, expected, strict=True)])
    assert tokens_of(run_engine(base, drafter, requests, num_draft_tokens=10)) == expected


@pytest.mark.parametrize("heads", [1, 2, 3, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_a_small_copy_has_as_many_kv_heads_as_its_heads_can_share(heads: int, shared: bool) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1 if shared else heads, "hidden_size": 6 * heads}
    model = build("qwen2", **_SMALL | sizes, intermediate_size=48, num_hidden_layers=2)
    assert lengths_beyond(model.config, BaseModel(model).max_positions)  # so there has been a small copy


def test_logits_of_minus_infinity_are_no_other_logits() -> None:
    """As of the rows of a vocabulary that are no tokens."""
    model = build("phi", **_SMALL, intermediate_size=48, num_hidden_layers=2)
    with torch.no_grad():
        model.lm_head.bias[40:] = -torch.inf
    model.generation_config.eos_token_id = None
    base = BaseModel(model)
    prompt, request = [5, 6, 7], Request([5, 6, 7], SamplingParams(12, ignore_eos=True))
    expected = generate_reference(model, prompt, 12)
    drafter = OracleDrafter([prompt + expected])
    assert run_engine(base, drafter, [request], num_draft_tokens=6)[0].token_ids == expected


@pytest.mark.parametrize("window", [6, 300, 5000])
def test_windows_of_any_length_are_proved(window: int) -> None:
    """The first is passed by the proof's own texts, the second on a small copy; no text is as long as the third."""
    sizes = {"intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2}
    model = build("mistral", **_SMALL | sizes, sliding_window=window, max_position_embeddings=4096)
    assert BaseModel(model).max_positions == 4096


def test_a_small_copy_is_short_of_sight_and_no_list_of_names_says_where() -> None:
    config = AutoConfig.for_model("qwen3", sliding_window=4096, use_sliding_window=True, max_window_layers=30)
    config.some_reach = {"of_tokens": [700, 40_000], "share": 0.5}
    assert lengths_beyond(config, 32_768) == {"sliding_window": 4096, "max_window_layers": 30, "of_tokens": 700}
    small = small_config(config, 32_768)
    assert (small.sliding_window, small.some_reach) == (8, {"of_tokens": [8, 40_000], "share": 0.5})
    assert small.layer_types == ["full_attention", "sliding_attention"]
    assert (small.num_hidden_layers, small.hidden_size, small.vocab_size) == (2, 32, 97)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (4, 4, 8)
    assert config.sliding_window == 4096


def test_llama_4_is_decoded_only_where_rows_do_not_hang_on_each_other() -> None:
    fields = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "intermediate_size": 48}
    fields |= {"attention_chunk_size": 16, "floor_scale": 100, "num_hidden_layers": 4, "num_key_value_heads": 2}
    assert BaseModel(build("llama4_text", **_SMALL | fields)).max_positions == 99


def test_ends_that_no_vocabulary_has_are_left_out() -> None:
    """Such as those of a model whose vocabulary was cut; a grammar could not name them."""
    base = BaseModel(random_model("llama"))
    base.model.generation_config.eos_token_id = [2, 60_000, -1, None, 5.0]
    assert base.eos_token_ids == {2, 5}
    base.model.generation_config.eos_token_id = 60_000
    assert base.eos_token_ids == frozenset()


def test_encoder_decoders_are_refused() -> None:
    model = build("t5", AutoModelForSeq2SeqLM, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50)
    with pytest.raises(LoadError, match="t5 is an encoder-decoder"):
        BaseModel(model)


def test_from_pretrained_reads_a_folder(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    base = load_base(tmp_path, device="cpu")
    assert (base.hidden_size, base.vocab_size, base.max_positions, base.dtype) == (32, 97, 128, torch.float32)
    assert base.eos_token_ids == {2}


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """Folder of a model whose LM head is its embedding, and in no file of its own."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    build("llama", vocab_size=64, tie_word_embeddings=True, **sizes).save_pretrained(tmp_path)
    return tmp_path


def test_loads_in_several_threads_are_each_complete(tied: Path) -> None:
    """transformers replaces functions of the whole process while it loads, and overlapping loads leave that."""
    replaced = PreTrainedModel.tie_weights, torch.linspace

    def load(_: int) -> bool:
        model = load_base(tied, device="cpu").model
        return model.lm_head.weight is model.get_input_embeddings().weight and not model.lm_head.weight.is_meta

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(load, range(18))) == [True] * 18
    assert (PreTrainedModel.tie_weights, torch.linspace) == replaced


def test_a_process_whose_other_loads_have_overlapped_still_loads(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PreTrainedModel.tie_weights
    monkeypatch.setattr(PreTrainedModel, "tie_weights", lambda *_, **__: None)  # as two loads leave it
    model = load_base(tied, device="cpu").model
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert PreTrainedModel.tie_weights is original


def test_weights_without_data_are_named() -> None:
    model = random_model("llama")
    model.model.layers[1].mlp.up_proj.to("meta")
    with pytest.raises(LoadError, match=r"'mine': no data was loaded for model\.layers\.1\.mlp\.up_proj\.weight"):
        require_data("mine", model)
    model.hf_device_map = {"model.layers.1": "disk"}
    require_data("mine", model)


def test_soft_capped_attention_loads_with_the_eager_kernel(tmp_path: Path) -> None:
    random_model("gemma2").save_pretrained(tmp_path)
    assert load_base(tmp_path, device="cpu").model.config._attn_implementation == "eager"


def test_longrope_is_decoded_only_where_texts_do_not_hang_on_each_other() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 64}
    model = build(
        "phi3", **sizes, **lengths, num_key_value_heads=2, vocab_size=50, pad_token_id=0, rope_parameters=rope
    )
    assert BaseModel(model).max_positions == 64


def test_fingerprint_tells_bases_apart_but_not_precisions(tmp_path: Path) -> None:
    random_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    found = {load_base(tmp_path, device="cpu", dtype=dtype).fingerprint for dtype in ("float32", "bfloat16", "float16")}
    assert len(found) == 1
    assert BaseModel(random_model("llama", seed=1)).fingerprint not in found


def test_every_tensor_takes_part_in_the_fingerprint() -> None:
    """A low-rank change that is merged into one matrix makes another base; the first scheme saw none of these."""
    model = random_model("llama").requires_grad_(False)
    unchanged = fingerprint(model, [])
    seen = {unchanged}
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    for matrix in matrices:
        before = matrix.clone()
        torch.manual_seed(3)
        matrix += torch.randn(len(matrix), 1) @ torch.randn(1, matrix.shape[1]) * 0.02
        seen.add(fingerprint(model, []))
        matrix.copy_(before)
    assert len(seen) == 1 + len(matrices)
    assert fingerprint(model, []) == unchanged


def test_large_tensors_are_sampled_from_end_to_end() -> None:
    layer = torch.nn.Linear(300, 200, bias=False).requires_grad_(False)
    seen = {fingerprint(layer, [])}
    for place in (0, 300 * 200 - 1):
        layer.weight.view(-1)[place] += 1.0
        seen.add(fingerprint(layer, []))
    assert len(seen) == 3


def test_missing_and_damaged_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="nowhere"):
        load_base(tmp_path / "nowhere")
    random_model("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(LoadError, match=str(tmp_path / "model")):
        load_base(tmp_path / "model", device="cpu")
    with pytest.raises(LoadError, match="no tokenizer"):
        load_tokenizer(tmp_path / "model")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with weights in several files."""
    folder = tmp_path_factory.mktemp("sharded") / "model"
    random_model("llama").save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.mark.parametrize("named", ["../outside.safetensors", "{}/outside.safetensors", "sub/one.safetensors", "..", 7])
def test_an_index_that_names_weights_elsewhere_is_refused(sharded: Path, tmp_path: Path, named: object) -> None:
    folder = shutil.copytree(sharded, tmp_path / "model")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensor, file = next(iter(index["weight_map"].items()))
    shutil.copy(folder / file, tmp_path / "outside.safetensors")
    index["weight_map"][tensor] = named.format(tmp_path) if isinstance(named, str) else named
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"index\.json names the weights .* which are not a file in its folder"):
        load_base(folder, device="cpu")


def test_an_index_that_is_none_is_refused_in_a_line(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "model")
    for text in ("[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": []}}', "[" * 100_000):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(LoadError, match=r"index\.json cannot be read") as error:
            load_base(folder, device="cpu")
        assert "\n" not in str(error.value)


def test_links_lead_nowhere_but_to_the_blobs_of_the_hubs_cache(sharded: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    expected = load_base(sharded, device="cpu").fingerprint
    assert load_base(snapshot, device="cpu").fingerprint == expected
    elsewhere = tmp_path / "model"
    elsewhere.symlink_to(sharded)
    assert load_base(elsewhere, device="cpu").fingerprint == expected
    linked = shutil.copytree(snapshot, tmp_path / "linked", symlinks=True)
    for file in linked.iterdir():
        file.unlink()
        file.symlink_to(sharded / file.name)
    with pytest.raises(LoadError, match=r"model-.*safetensors is a link to .*, which is not in its folder: copy it"):
        load_base(linked, device="cpu")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 2**62},
        {"vocab_size": -1},
        {"num_attention_heads": 0},
        {"dtype": "float8_e4m3fn"},
        {"layer_types": [["full_attention"]]},
        {"transformers_weights": "../outside.safetensors"},
        {"rope_parameters": 7},
    ],
    ids=str,
)
def test_a_configuration_of_no_model_is_refused_in_a_line(tied: Path, change: dict[str, object]) -> None:
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | change))
    if "dtype" in change:  # it says how the weights are kept, and not how they are computed with
        assert load_base(tied, device="cpu").dtype == torch.float32
        return
    with pytest.raises(LoadError) as error:
        load_base(tied, device="cpu")
    assert "\n" not in str(error.value)


def test_a_configuration_that_is_nested_too_deep_is_refused_in_a_line(tied: Path) -> None:
    for depth in (900, 100_000):
        (tied / "config.json").write_text('{"model_type": "llama", "more": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(LoadError) as error:
            load_base(tied, device="cpu")
        assert "\n" not in str(error.value)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = random_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"but pytorch_model\.bin; pickled weights are never loaded"):
        load_base(tmp_path, device="cpu")


def test_unknown_devices_and_dtypes_are_refused() -> None:
    with pytest.raises(LoadError, match="tpu-nine"):
        pick_device("tpu-nine")
    with pytest.raises(LoadError, match="float7"):
        pick_dtype("float7", torch.device("cpu"))
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32


def test_a_prompt_may_be_prefilled_in_pieces(tiny_base: BaseModel) -> None:
    prompt = torch.arange(3, 40)
    whole_cache, pieces_cache = tiny_base.new_cache(2, 64), tiny_base.new_cache(2, 64)
    whole = tiny_base.prefill(whole_cache, 1, [prompt])
    pieces = [tiny_base.prefill(pieces_cache, 1, [prompt[at : at + 8]], [at]) for at in range(0, len(prompt), 8)]
    assert torch.allclose(whole, torch.cat(pieces), atol=1e-4)
    for a, b in zip(kv_of(whole_cache).buffers, kv_of(pieces_cache).buffers, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_several_prompts_may_be_prefilled_at_once(tiny_base: BaseModel) -> None:
    assert tiny_base.allow_packing()
    beginning, prompts, starts = torch.arange(60, 67), [torch.arange(3, 20), torch.arange(20, 21)], [0, 7]
    caches = tiny_base.new_cache(3, 32), tiny_base.new_cache(3, 32)
    for cache in caches:
        tiny_base.prefill(cache, 2, [beginning])
    together = tiny_base.prefill(caches[0], 1, prompts, starts)
    apart = [tiny_base.prefill(caches[1], 1 + row, [prompts[row]], [starts[row]]) for row in range(2)]
    assert torch.allclose(together, torch.cat(apart), atol=1e-4)
    for ours, theirs in zip(*[kv_of(cache).buffers for cache in caches], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_what_is_read_of_a_prompt_comes_back_to_one_gpu() -> None:
    with mock.patch("drafter.target_model.model.prepack"):
        base = BaseModel(random_model("llama"), native=False)
    with fake_gpus(), torch.inference_mode():
        move_to_gpus(base, 2)
        cache, prompt = base.new_cache(2, 32), torch.zeros(5, dtype=torch.long, device=base.device)
        layers = (0, 2, LM_HEAD_INPUT)
        hidden = base.prefill(cache, 0, [prompt], [0], layers)
        logits, last_hidden = base.prefill_last(cache, 0, prompt, 5, layers)
        assert {hidden.device, logits.device, last_hidden.device} == {base.device}
        assert hidden.shape == last_hidden.shape == (5, 3 * base.hidden_size)
        assert base.lm_head(hidden[:, : base.hidden_size]).device == base.device
