"""Train a small hybrid, three gated delta layers for each of attention, to answer as the embedded base does.

    python -m recipes.hybrid.train hybrid --output build/hybrid
    python -m recipes.hybrid.train softmax --output build/softmax

Both have the layout of Qwen3.5 and the embedded base's tokeniser. They begin with what fits of every second of its
layers, and learn its distributions over next tokens on the texts that it was trained on. `softmax` has the same size
and training, with attention in all layers. Started again with the same arguments, a run resumes from
`OUTPUT/state.pt`.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from drafter.embedded import EMBEDDED_BASE
from recipes.embedded.gsm8k import read_split
from recipes.embedded.train_base import add_arguments, encode, fit, perplexity

_DELTA, _ATTENTION = "linear_attention", "full_attention"
LAYER_TYPES = {"hybrid": [_DELTA, _DELTA, _DELTA, _ATTENTION], "softmax": [_ATTENTION] * 4}
_FROM = (0, 2, 5, 7)
"""The base's layers that these begin with."""
_NEURONS = 384
"""Of each gated MLP: those of the base's 704 whose weights are largest."""
_DT_RANGE = (1e-3, 0.1)
"""Range of the first step sizes, as in Mamba 2: a state then lasts for tens to hundreds of tokens."""


def build_model(base: LlamaForCausalLM, layer_types: list[str]) -> Qwen3_5ForCausalLM:
    """Return a model of the base's width that begins with the base's weights where they fit."""
    like = base.config
    config = Qwen3_5TextConfig(
        vocab_size=like.vocab_size,
        hidden_size=like.hidden_size,
        intermediate_size=_NEURONS,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_attention_heads=like.num_attention_heads,
        num_key_value_heads=like.num_key_value_heads,
        head_dim=like.head_dim,
        linear_num_key_heads=like.num_attention_heads,
        linear_num_value_heads=like.num_attention_heads,
        linear_key_head_dim=like.head_dim,
        linear_value_head_dim=like.head_dim,
        max_position_embeddings=like.max_position_embeddings,
        rope_parameters={**like.rope_parameters, "partial_rotary_factor": 1.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=like.eos_token_id,
        pad_token_id=like.pad_token_id,
    )
    model = Qwen3_5ForCausalLM(config)
    model.generation_config = base.generation_config
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(base.model.embed_tokens.weight)
        _copy_norm(base.model.norm, model.model.norm)
        layers = [base.model.layers[place] for place in _FROM]
        for kind, ours, theirs in zip(layer_types, model.model.layers, layers, strict=True):
            _begin_mlp(theirs.mlp, ours.mlp)
            _copy_norm(theirs.input_layernorm, ours.input_layernorm)
            _copy_norm(theirs.post_attention_layernorm, ours.post_attention_layernorm)
            if kind == _DELTA:
                _begin_delta(theirs.self_attn, ours.linear_attn)
            else:
                _begin_attention(theirs.self_attn, ours.self_attn)
    return model


def _copy_norm(source: Any, target: Any) -> None:
    target.weight.copy_(source.weight - 1)  # these weights are differences from one


def _begin_mlp(source: Any, target: Any) -> None:
    """Copy the neurons whose weights are largest."""
    parts = source.gate_proj.weight, source.up_proj.weight, source.down_proj.weight.T
    kept = torch.stack([part.norm(dim=1) for part in parts]).prod(0).topk(_NEURONS).indices.sort().values
    target.gate_proj.weight.copy_(parts[0][kept])
    target.up_proj.weight.copy_(parts[1][kept])
    target.down_proj.weight.copy_(parts[2][kept].T)


def _begin_attention(source: Any, target: Any) -> None:
    """Copy softmax attention. Its gate begins half open, so that its output counts twice."""
    gated = target.q_proj.weight.view(-1, 2, source.head_dim, source.q_proj.in_features)
    gated[:, 0] = source.q_proj.weight.view_as(gated[:, 0])
    gated[:, 1] = 0
    target.k_proj.weight.copy_(source.k_proj.weight)
    target.v_proj.weight.copy_(source.v_proj.weight)
    target.o_proj.weight.copy_(2 * source.o_proj.weight)


def _begin_delta(source: Any, target: Any) -> None:
    """Begin with the projections of softmax attention, and convolutions that let their last input through."""
    target.in_proj_qkv.weight.copy_(torch.cat([source.q_proj.weight, source.k_proj.weight, source.v_proj.weight]))
    target.out_proj.weight.copy_(source.o_proj.weight)
    target.conv1d.weight[:, :, -1] += 1
    low, high = map(math.log, _DT_RANGE)
    dt = torch.empty_like(target.dt_bias).uniform_(low, high).exp()
    target.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
    target.A_log.uniform_(0, math.log(16))


def divergence(model: PreTrainedModel, teacher: PreTrainedModel, batch: Tensor) -> Tensor:
    """Return the mean KL divergence, in nats, of the model's next tokens from the teacher's on `batch` `[B, L]`.

    Padding, -100, does not count.
    """
    given: dict[str, Any] = {
        "input_ids": batch.clamp_min(0),
        "attention_mask": (batch >= 0).long(),
        "use_cache": False,
    }
    counted = batch >= 0
    with torch.autocast(batch.device.type, torch.bfloat16):
        with torch.no_grad():
            wanted = teacher(**given).logits[counted]
        found = model(**given).logits[counted]
    return F.kl_div(found.float().log_softmax(1), wanted.float().log_softmax(1), reduction="batchmean", log_target=True)


@torch.no_grad()
def agreement(model: PreTrainedModel, teacher: PreTrainedModel, documents: list[list[int]]) -> float:
    """Return the share of positions at which both find the same token most probable."""
    same = count = 0
    for ids in documents:
        text = torch.tensor([ids])
        ours, theirs = (one(text, use_cache=False).logits.argmax(-1) for one in (model, teacher))
        same += int((ours == theirs).sum())
        count += len(ids)
    return same / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", choices=LAYER_TYPES)
    add_arguments(parser, steps=1_000, tokens_per_step=1_024, learning_rate=1.5e-3)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    tokenizer.save_pretrained(args.output)
    teacher = LlamaForCausalLM.from_pretrained(EMBEDDED_BASE, dtype=torch.float32).eval()
    model = build_model(teacher, LAYER_TYPES[args.layers])
    documents, held_out = (encode(tokenizer, read_split(split)) for split in ("base", "validation"))
    print(f"{model.num_parameters():,} parameters, {sum(map(len, documents)):,} tokens an epoch", flush=True)

    fit(model, lambda batch: divergence(model, teacher, batch), documents, args)
    model.to(torch.bfloat16).save_pretrained(args.output)
    model.float().eval()  # the weights stay rounded to bf16
    report = {
        "parameters": model.num_parameters(),
        "steps": args.steps,
        "tokens_per_step": args.tokens_per_step,
        "learning_rate": args.learning_rate,
        "seed": args.seed,
        "validation_perplexity": perplexity(model, held_out),
        "validation_agreement": agreement(model, teacher, held_out),
    }
    (args.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
