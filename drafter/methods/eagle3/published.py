"""EAGLE-3 heads in the formats of SafeAILab/EAGLE, SpecForge and speculators.

All have the same tensors, but name the decoder layer `midlayer` or `layers.0`, and their `config.json` differ:
SafeAILab's name the target model's architecture, such as `LlamaForCausalLM`, and one claims as many layers. `d2t` holds
each draft id's token minus the id; `t2d` marks the drafted tokens.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from drafter.drafters.target import Target
from drafter.errors import LoadError, shown
from drafter.heads.published import (
    Json,
    Layout,
    PublicHead,
    TargetOfExport,
    Weights,
    count,
    group,
    number,
    refuse_other_base,
    refuse_others,
    refuse_unfit,
    refuse_unknown,
    words,
)
from drafter.methods.eagle3.head import Eagle3HeadConfig, fused_layers

_DEPTH = 7  # levels of a tree where a configuration does not say: those the published heads were trained for
_SPECULATORS = "0.9.0"  # version of speculators whose configuration is written
_LAYERS = ("midlayer.", "layers.0.")
_UNREAD = {"t2d", "embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
"""Tensors that follow from others, or are the target model's."""


_ARCHITECTURE = re.compile(
    r"(?!\w*(DFlash|DSpark|PEagle|Pard|Medusa|MTP))\w*(Eagle3\w*|ForCausalLM|ForConditionalGeneration)"
)
"""Those of EAGLE-3 heads and of target models: others draft otherwise."""
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "eagle", "eagle3")
"""What layers are like, by transformers' names, or by those of the methods."""
_LAYER = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
"""What the configuration of a layer may say of its kind."""
_READS = "eagle_aux_hidden_state_layer_ids"
_OF_PARALLEL = "parallel_draft_heads_num_layers"  # of heads of further steps, of which there are none with one step
_DRAFTING = {
    "next_layer_regular": True,
    "eagle_decoder_type": "llama",
    "parallel_draft_step": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
"""What NVIDIA's model optimiser may say of how a head drafts."""
_ROPE = {"partial_rotary_factor": 1.0}
_ROPE_READ = words("factor high_freq_factor low_freq_factor original_max_position_embeddings rope_theta rope_type type")
_LAYER_KEYS = words(
    "head_dim hidden_size intermediate_size layer_types max_window_layers num_attention_heads num_hidden_layers "
    "num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings "
    "use_sliding_window vocab_size"
) | set(_LAYER)
_KEYS = (
    words(
        "draft_vocab_size eagle_config embed_requires_grad fc_norm norm_before_fc norm_before_residual norm_output "
        "speculators_config speculators_model_type speculators_version target_hidden_size target_model_type "
        "tie_word_embeddings transformer_layer_config"
    )
    | {_READS, _OF_PARALLEL}
    | set(_DRAFTING)
    | _LAYER_KEYS
)


def _recognises(config: Json) -> bool:
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    return "draft_vocab_size" in config


def _read(name: str, config: Json, tensors: Weights, base: Target) -> PublicHead:
    speculators = "speculators_model_type" in config
    layer: Json = group(name, config, "transformer_layer_config") if speculators else config
    verifier = group(name, group(name, config, "speculators_config"), "verifier")
    made_for = verifier.get("name_or_path") or config.get("base_model_name_or_path")
    sizes = {"hidden_size": count(name, layer, "hidden_size"), "vocab_size": count(name, layer, "vocab_size")}
    refuse_other_base(name, base, made_for, sizes)
    _refuse_unknown_kinds(name, config, layer, speculators=speculators)
    if "embed_tokens.weight" in tensors:
        _refuse_other_embeddings(name, base, tensors["embed_tokens.weight"])
    prefix = next((one for one in _LAYERS if f"{one}hidden_norm.weight" in tensors), _LAYERS[0])
    heads = count(name, layer, "num_attention_heads")
    fields: dict[str, Any] = {
        **sizes,
        "hidden_layers": _hidden_layers(name, config, base.num_layers),
        "depth": _DEPTH,
        "num_heads": heads,
        "num_kv_heads": count(name, layer, "num_key_value_heads", heads),
        "head_size": layer.get("head_dim"),
        "intermediate_size": count(name, layer, "intermediate_size"),
        "fusion_norm": "whole" if config.get("norm_before_fc") else "each" if config.get("fc_norm") else "none",
        "qk_norm": f"{prefix}self_attn.q_norm.weight" in tensors,
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_output": bool(config.get("norm_output")),
        "norm_eps": number(name, layer, "rms_norm_eps", 1e-6),
        **_rope(name, layer),
    }
    drafted = count(name, config, "draft_vocab_size", sizes["vocab_size"])
    fields["draft_vocab_size"] = drafted if drafted < sizes["vocab_size"] else None
    return PublicHead(
        "speculators" if speculators else "EAGLE", "eagle3", fields, _ours(name, tensors, fields, prefix), made_for
    )


def _theirs(config: Eagle3HeadConfig, prefix: str) -> dict[str, tuple[str, ...]]:
    """Map our tensor names to published ones; several are concatenated along dimension 0."""
    each = [f"fc_norm.{place}.weight" for place in range(len(config.hidden_layers))]
    norms = {"none": [], "whole": ["input_norm.weight"], "each": each}[config.fusion_norm]
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    names: dict[str, tuple[str, ...]] = {
        **{f"fusion.norms.{place}.weight": (norm,) for place, norm in enumerate(norms)},
        "fusion.linear.weight": ("fc.weight",),
        "layer.token_norm.weight": (f"{prefix}input_layernorm.weight",),
        "layer.hidden_norm.weight": (f"{prefix}hidden_norm.weight",),
        "layer.qkv.weight": tuple(f"{attention}{one}_proj.weight" for one in "qkv"),
        "layer.out.weight": (f"{attention}o_proj.weight",),
        "layer.mlp_norm.weight": (f"{prefix}post_attention_layernorm.weight",),
        "layer.gate_up.weight": (f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
        "layer.down.weight": (f"{mlp}down_proj.weight",),
        "norm.weight": ("norm.weight",),
        "output_layer.weight": ("lm_head.weight",),
    }
    if config.qk_norm:
        names["layer.query_norm.weight"] = (f"{attention}q_norm.weight",)
        names["layer.key_norm.weight"] = (f"{attention}k_norm.weight",)
    return names


def _ours(name: str, tensors: Weights, fields: Json, prefix: str) -> Weights:
    try:
        names = _theirs(Eagle3HeadConfig(**fields), prefix)
    except (TypeError, ValueError) as error:
        raise LoadError(f"draft head {name!r}: {error}") from error
    needed = [*(one for parts in names.values() for one in parts), *(["d2t"] if fields["draft_vocab_size"] else [])]
    refuse_unfit(name, needed, tensors, {*_UNREAD, "d2t"})
    found = {ours: torch.cat([tensors[one] for one in parts]) for ours, parts in names.items()}
    if fields["draft_vocab_size"]:
        found["vocabulary.tokens"] = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    return found


def _refuse_other_embeddings(name: str, base: Target, embeddings: Tensor) -> None:
    """Raise `LoadError` unless a head's copy of the token embeddings `[V, d]` is the target model's, up to rounding."""
    own = base.embed(torch.arange(base.vocab_size, device=base.device)).cpu().float()
    if embeddings.shape != own.shape or bool(((embeddings.float() - own).abs() > 0.01 * own.abs().amax()).any()):
        raise LoadError(
            f"draft head {name!r} does not belong to {base.name!r}: the token embeddings that it was trained with are "
            "others; load the target model that it was trained for"
        )


def _hidden_layers(name: str, config: Json, layers: int) -> list[int]:
    """Return the layers whose outputs are fused.

    speculators counts the states between layers, the embeddings being 0; SpecForge counts layers by their outputs.
    """
    key = _READS
    states, outputs = config.get(key) or [], group(name, config, "eagle_config").get(key) or []
    if not states and not outputs:
        return list(fused_layers(layers))
    ids = states or outputs
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise LoadError(f"draft head {name!r}: its config.json says {key} = {shown(ids)}, which are no layers")
    found = [state - 1 for state in states] if states else list(outputs)
    if not all(0 <= one < layers for one in found):
        raise LoadError(
            f"draft head {name!r} reads hidden states {ids}, and a target model of {layers} layers does not have "
            "all of them, or they are its embeddings"
        )
    return found


def _rope(name: str, layer: Json) -> dict[str, Any]:
    parameters = group(name, layer, "rope_parameters")
    scaling = group(name, layer, "rope_scaling") or {key: one for key, one in parameters.items() if key != "rope_theta"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = parameters.get("rope_theta", layer.get("rope_theta"))
    return {
        "rope_theta": float(number(name, {"rope_theta": theta}, "rope_theta", 10_000.0)),
        "rope_scaling": None if kind == "default" else dict(scaling),
    }


def _refuse_unknown_kinds(name: str, config: Json, layer: Json, *, speculators: bool) -> None:
    """Raise `LoadError` for an unsupported layer, or another way of drafting."""
    for architecture in config.get("architectures") or []:
        if not _ARCHITECTURE.fullmatch(str(architecture)):
            raise LoadError(f"draft head {name!r} is of the architecture {shown(architecture)}, which is not known")
    kind = layer.get("model_type", _MODEL_TYPES[0])
    if kind not in _MODEL_TYPES:
        raise LoadError(
            f"draft head {name!r} has a layer like {shown(kind)}, and only {', '.join(_MODEL_TYPES)} can be run"
        )
    if layer.get("use_sliding_window") is not False and layer.get("sliding_window") is not None:
        raise LoadError(f"draft head {name!r} has sliding_window = {shown(layer['sliding_window'])}: none can be run")
    # SafeAILab's say how many layers their target model has.
    refuse_others(name, layer, _LAYER | ({"num_hidden_layers": 1} if speculators else {}))
    if set(layer.get("layer_types") or ()) - {"full_attention"}:
        raise LoadError(
            f"draft head {name!r} has layer_types {shown(layer['layer_types'])}: only full attention is run"
        )
    said = group(name, config, "eagle_config")
    refuse_others(name, config, _DRAFTING)
    refuse_others(name, said, _DRAFTING, "eagle_config.")
    refuse_unknown(name, said, {*_DRAFTING, _READS, _OF_PARALLEL}, "eagle_config.")
    for key in ("rope_parameters", "rope_scaling"):
        rope = group(name, layer, key)
        refuse_others(name, rope, _ROPE, f"{key}.")
        refuse_unknown(name, rope, {*_ROPE, *_ROPE_READ}, f"{key}.")
    if speculators:
        refuse_unknown(name, layer, _LAYER_KEYS, "transformer_layer_config.")
        refuse_others(name, group(name, config, "speculators_config"), {"algorithm": "eagle3"}, "speculators_config.")
    if config.get("target_hidden_size") not in (None, layer["hidden_size"]):
        raise LoadError(
            f"draft head {name!r} is of another width than its target model: {layer['hidden_size']:,} and "
            f"{config['target_hidden_size']:,}; only heads of its width can be run"
        )


def _check_exportable(shape: Eagle3HeadConfig) -> None:
    if len(shape.hidden_layers) != 3 or min(shape.hidden_layers) < 0:
        raise LoadError(
            f"an exported EAGLE-3 head reads the outputs of three layers, and this one hidden_layers "
            f"{list(shape.hidden_layers)}: train it with three, counted from 0"
        )


def _export(shape: Eagle3HeadConfig, tensors: Weights, base: TargetOfExport) -> tuple[dict[str, Any], Weights]:
    layer = {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", **(shape.rope_scaling or {}), "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if base.max_positions is not None:
        layer["max_position_embeddings"] = base.max_positions
    proposal = {"proposal_type": "greedy", "speculative_tokens": shape.depth}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": base.name, "architectures": list(base.architectures)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.draft_vocab_size or shape.vocab_size,
        # speculators counts the states between layers, the embeddings being 0.
        "eagle_aux_hidden_state_layer_ids": [one + 1 for one in shape.hidden_layers],
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.fusion_norm == "whole",
        "fc_norm": shape.fusion_norm == "each",
        "norm_output": shape.norm_output,
        "tie_word_embeddings": False,
    }
    heads, kv_heads = shape.num_heads * shape.head_width, shape.kv_heads * shape.head_width
    rows = {"layer.qkv.weight": [heads, kv_heads, kv_heads], "layer.gate_up.weight": [shape.intermediate_size] * 2}
    found = {
        one: part
        for ours, parts in _theirs(shape, "layers.0.").items()
        for one, part in zip(parts, tensors[ours].split(rows.get(ours, len(tensors[ours]))), strict=True)
    }
    if base.embeddings is not None:
        found["embed_tokens.weight"] = base.embeddings.to(tensors["norm.weight"].dtype)
    if shape.draft_vocab_size is not None:
        tokens = tensors["vocabulary.tokens"]
        found["d2t"] = tokens - torch.arange(len(tokens))
        found["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    return config, found


LAYOUT = Layout("eagle3", _KEYS, _recognises, _read, _check_exportable, _export)
