"""A Llama of transformers as a GGUF file, which llama.cpp reads. NumPy and `gguf` are all that it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_KINDS = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
"""What llama.cpp calls a weight; those of layers without the layer's prefix."""


def write_gguf(model: Path, file: Path, dtype: str, ends: Sequence[int]) -> None:
    """Write a model's weights to a file, completely or not at all.

    The vocabulary is made up: tokens go in and out as numbers, and llama.cpp only has to have a text for each.

    Args:
        model: Folder with `config.json` and safetensors.
        file: What is written.
        dtype: `float32` or `bfloat16`, of all weights but those of the norms, which are fp32.
        ends: Tokens that end a text, at most three.

    Raises:
        ValueError: It is no Llama, its positions are scaled, or it has another kind of weights.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    partial = file.with_name(f"{file.name}.partial")
    writer = gguf.GGUFWriter(partial, "llama")
    _add_sizes(writer, config)
    _add_vocabulary(writer, config["vocab_size"], ends)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": _key_value_heads(config)}
    for name, weight in tensors(model):
        projection = name.split(".")[-2]
        rows = interleaved(weight, heads[projection]) if projection in heads else weight
        kind = _KINDS["float32" if weight.ndim == 1 else dtype]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(file)


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls a weight.

    Raises:
        ValueError: A Llama has no such weight.
    """
    prefix, rest = "", name
    if name.startswith("model.layers."):
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        prefix = f"blk.{layer}."
    if rest not in _NAMES:
        raise ValueError(f"the weight {name} is none of a Llama")
    return prefix + _NAMES[rest]


def interleaved(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return the rows `[heads · d, width]` of a query or key projection in llama.cpp's order.

    transformers turns number i of a head together with number i + d/2, llama.cpp number 2i together with 2i + 1.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def tensors(model: Path) -> Iterator[tuple[str, Floats]]:
    """Return the name and the numbers of all weights in a folder's safetensors.

    Raises:
        ValueError: A weight is neither fp32 nor bf16.
    """
    for file in sorted(model.glob("*.safetensors")):
        stored = np.memmap(file, np.uint8, "r")
        start = 8 + int(stored[:8].view("<u8")[0])
        header: Mapping[str, Any] = json.loads(stored[8:start].tobytes())
        for name, about in header.items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                yield name, _floats(name, stored[start + first : start + last], about["dtype"]).reshape(about["shape"])


def _floats(name: str, stored: NDArray[np.uint8], dtype: str) -> Floats:
    """Return numbers as fp32. NumPy has no bf16, which is the first half of fp32."""
    if dtype == "BF16":
        return (np.frombuffer(stored.tobytes(), "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F32":
        return np.frombuffer(stored.tobytes(), "<f4")
    raise ValueError(f"the weight {name} is {dtype}, and neither BF16 nor F32")


def _key_value_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _add_sizes(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": "default"}
    if config["model_type"] != "llama" or rope["rope_type"] != "default" or config.get("rope_scaling"):
        raise ValueError("only a Llama whose positions are not scaled can be written as GGUF")
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(_key_value_heads(config))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_vocabulary(writer: gguf.GGUFWriter, size: int, ends: Sequence[int]) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{token} " for token in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    for add, end in zip(
        (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), ends, strict=False
    ):
        add(end)
