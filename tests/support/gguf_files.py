"""A tiny Llama as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType, quants
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "t h", "th e"]


_SCALES = {
    GGMLQuantizationType.Q4_K: {0: 3e-4, 2: 2e-3},
    GGMLQuantizationType.Q5_K: {0: 1.5e-4, 2: 2e-3},
    GGMLQuantizationType.Q6_K: {208: 5e-5},
}
"""Of formats that the package does not write: where a block has fp16 numbers, and some that suit a small model."""


def tiny_llama(**changes: Any) -> Any:
    """Return a random Llama whose widths are multiples of 32, as blocks of quantised weights are."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(_vocabulary()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | changes))


def blocks_of(weight: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Return weights `[rows, inputs]` in a format; of one that the package does not write, random ones."""
    if kind not in _SCALES:
        return quants.quantize(np.ascontiguousarray(weight), kind)  # type: ignore[no-any-return]
    inputs, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(weight.shape)
    blocks = generator.integers(0, 256, (weight.size // inputs, size), dtype=np.uint8)
    for place, scale in _SCALES[kind].items():
        halves = (scale * generator.uniform(0.5, 1.5, (len(blocks), 1))).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8)
    return blocks.reshape(len(weight), -1)


def write_gguf(model: Any, file: Path, kinds: Mapping[str, GGMLQuantizationType] | None = None) -> None:
    """Write a model as llama.cpp's converter would: queries and keys in its order of rotary pairs, matrices in Q4_1.

    Args:
        kinds: Other formats, by what the names of tensors in the file have in them.
    """
    config, weights = model.config, model.state_dict()
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_vocabulary())
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (config.vocab_size - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for ours, theirs in _names(config.num_hidden_layers).items():
        weight = weights[ours].numpy()
        if "q_proj" in ours or "k_proj" in ours:
            heads = config.num_attention_heads if "q_proj" in ours else config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        if weight.ndim == 1:
            writer.add_tensor(theirs, weight)
        else:
            named = (kind for part, kind in (kinds or {}).items() if part in theirs)
            kind = next(named, GGMLQuantizationType.Q4_1)
            writer.add_tensor(theirs, blocks_of(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's weights as they are after Q4_1 and bf16: blocks of a row do not depend on the rows' order."""
    kind = GGMLQuantizationType.Q4_1
    found = {}
    for name in _names(model.config.num_hidden_layers):
        weight = model.state_dict()[name]
        if weight.dim() > 1:
            weight = torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), kind), kind))
        found[name] = weight.to(torch.bfloat16)
    return found


def _vocabulary() -> list[str]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIAL, *sorted(bytes_to_unicode().values()), *merged]


def _names(layers: int) -> dict[str, str]:
    """Return the name in a GGUF file of each weight of a Llama whose embeddings are tied."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(layers):
        names |= {f"model.layers.{layer}.{a}.weight": f"blk.{layer}.{b}.weight" for a, b in parts.items()}
    return names
