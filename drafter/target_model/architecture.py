"""A model's architecture: facts from its configuration, its fingerprint, and a small random copy of it."""

from __future__ import annotations

import copy
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from drafter.errors import LoadError, first_line

_MAKING = threading.RLock()
TIE_WEIGHTS, _LINSPACE = PreTrainedModel.tie_weights, torch.linspace
_ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
_STATE_KINDS = {"linear_attention", "conv"}  # layers that keep a state
_BOTH = {"hybrid": "full_attention"}  # layers that keep a state beside keys and values, and the kind of their attention
_MASKLESS = _STATE_KINDS | {"mlp", "moe"}  # layers that take no mask
_ALIBI = ("bloom", "mpt")
NO_PLACE = (
    "the engine has no place for what such layers keep, with or without a drafter: use transformers' generate for this "
    "model"
)
"""Why a model with a state of another kind is refused, as the end of a message."""


@contextmanager
def transformers_loading() -> Iterator[None]:
    """Hold the process's one lock for making models with transformers. Threads that load other models may, too.

    `from_pretrained` replaces `PreTrainedModel.tie_weights` and `torch.linspace` process-wide, and then restores what
    it found. If two loads overlap, the second leaves the first one's replacement there, and all later models with tied
    embeddings keep an `lm_head` without data.
    """
    with _MAKING:
        try:
            yield
        finally:
            # After a load outside of this lock that overlapped. Safe even while it is under way: its embeddings are
            # tied earlier, and once more when their weights are there.
            PreTrainedModel.tie_weights, torch.linspace = TIE_WEIGHTS, _LINSPACE


def make_model(make: Callable[..., Any]) -> Any:
    """Make a model by a function of transformers; with eager attention if it has no other."""
    with transformers_loading():
        try:
            return make()
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            return make(attn_implementation="eager")


def refuse_unsupported(name: str, config: Any) -> None:
    """Raise `LoadError` for architectures that a KV cache with a tree mask cannot decode, before weights are read."""
    if getattr(config, "is_encoder_decoder", False):
        raise LoadError(
            f"{name}: {config.model_type} is an encoder-decoder model; only decoder-only models can be a target model"
        )
    text = config.get_text_config(decoder=True)
    known = _ATTENTION_KINDS | _MASKLESS | _BOTH.keys()
    if foreign := sorted(set(getattr(text, "layer_types", None) or ()) - known):
        raise LoadError(f"{name}: {config.model_type} has {', '.join(foreign)} layers; {NO_PLACE}")
    if config.model_type in _ALIBI or getattr(text, "alibi", False):
        raise LoadError(
            f"{name}: {config.model_type} has ALiBi, which counts distances between entries of the KV cache, and those "
            "of a draft tree are not in the order of its text; it cannot be a target model"
        )
    if missing := [one for one in ("num_hidden_layers", "vocab_size") if not isinstance(getattr(text, one, None), int)]:
        raise LoadError(f"{name}: the configuration of {config.model_type} has no {' and no '.join(missing)}")
    known_models = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    if config.model_type not in known_models and not getattr(config, "auto_map", None):
        raise LoadError(f"{name}: {config.model_type} is not a causal language model that transformers knows")


def auto_class(config: Any) -> Any:
    """Return the class of transformers that makes the whole model of a configuration: with its eyes, if it has some."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def sees(config: Any) -> bool:
    """Return whether a model of this configuration has a vision tower."""
    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def decoder_of(model: Any) -> nn.Module:
    """Return the model without its LM head."""
    decoder: nn.Module = model.get_decoder()
    # Some models' `get_decoder` returns the model itself.
    if decoder is model and isinstance(inner := getattr(model, "model", None), nn.Module):
        return inner
    return decoder


def max_positions(config: Any) -> int | None:
    """Return the longest sequence, in tokens, that a batch decodes as each row by itself would; None if unknown."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        # Past this length the model scales the positions of a whole batch by its longest text: rows would depend on
        # each other.
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return int(original)
    fields = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "seq_length"))
    longest = next((int(found) for found in fields if found), None)
    if getattr(config, "attn_temperature_tuning", False) and (scale := getattr(config, "floor_scale", None)):
        # From there on Llama 4 scales attention by a token's cache index, as if all rows were equally long.
        return int(min(longest or scale, scale)) - 1
    return longest


def attention_kinds(config: Any) -> dict[str, tuple[int | None, int | None]]:
    """Return window and chunk, in tokens, of each kind of attention in a decoder, by transformers' name of the kind.

    Empty for a decoder without attention.
    """
    kinds = set(layer_kinds(config)) - _MASKLESS
    return {
        kind: (
            config.sliding_window if kind == "sliding_attention" else None,
            config.attention_chunk_size if kind == "chunked_attention" else None,
        )
        for kind in sorted(kinds)
    }


def whole_layers(config: Any) -> frozenset[int]:
    """Return the decoder's layers, counted from 0, whose attention has neither window nor chunks."""
    kinds = attention_kinds(config)
    return frozenset(number for number, kind in enumerate(layer_kinds(config)) if kinds.get(kind) == (None, None))


def state_layers(config: Any) -> frozenset[int]:
    """Return the decoder's layers, counted from 0, that keep a recurrent state."""
    of_layers = getattr(config, "layer_types", None) or ()
    return frozenset(number for number, kind in enumerate(of_layers) if kind in _STATE_KINDS or kind in _BOTH)


def maskless_kinds(config: Any) -> frozenset[str]:
    """Return the names by which a decoder's layers that are not attention ask for a mask; empty if it has none."""
    kinds = set(getattr(config, "layer_types", None) or ())
    # A layer that is both asks for two masks.
    return frozenset(_MASKLESS) if kinds & (_MASKLESS | _BOTH.keys()) else frozenset()


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of each of a decoder's layers, by transformers' name of its mask."""
    if of_layers := getattr(config, "layer_types", None):
        return [_BOTH.get(kind, kind) for kind in of_layers]
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


_SAMPLED = 1 << 14  # largest number of values hashed per tensor
_TINY = 2.0**-16  # smaller values count as zero: fp16 does not hold them as exactly as bf16 does


def target_fingerprint(model: Any) -> str:
    """Return the `fingerprint` of a whole target model, of which its sizes are a part.

    Taken before its first forward: some quantised layers lay out their weights there, as suits the processor.
    """
    config, head = model.config.get_text_config(decoder=True), model.get_output_embeddings()
    sizes = (int(config.num_hidden_layers), int(head.weight.shape[1]), int(config.vocab_size))
    return fingerprint(model, [model.config.model_type, *sizes])


def fingerprint(model: nn.Module, sizes: Sequence[Any]) -> str:
    """Return `v2-` and 16 hex digits of a hash of a model's `sizes`, parameters and buffers.

    Small tensors are hashed in whole, large ones sampled evenly. Values are rounded to bf16, so that fp32 and bf16
    loads agree, and fp16 ones of a model saved in half precision. Of quantised weights, which have a class of their
    own, it hashes what they consist of.

    Raises:
        LoadError: A weight has a class that does not tell what it consists of.
    """
    digest = hashlib.sha256(repr(list(sizes)).encode())
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):  # quantised layers may add other objects
            continue
        try:
            digest.update(repr(list(tensor.shape)).encode())
            for part in _parts(tensor):
                digest.update(_bytes(_sample(part)))
        except (AssertionError, AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            raise LoadError(
                f"{name} is a {type(tensor).__name__}, whose numbers cannot be read to tell this model from others "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error
    return f"v2-{digest.hexdigest()[:16]}"


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor of any class consists of."""
    if isinstance(tensor, DTensor):  # one process of several has a part of it
        tensor = tensor.full_tensor()
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor.detach().as_subclass(Tensor)


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.flatten()
    if len(flat) <= _SAMPLED:
        return flat
    places = torch.arange(_SAMPLED, device=flat.device) * (len(flat) - 1) // (_SAMPLED - 1)
    return flat[places]


def _bytes(values: Tensor) -> bytes:
    values = values.cpu()
    if values.is_floating_point() and values.element_size() > 1:
        values = values.to(torch.bfloat16)
        values = values.masked_fill(values.abs() < _TINY, 0.0)
    return values.contiguous().view(torch.uint8).numpy().tobytes()


# A small copy of a model: its class and settings, but narrow, with few layers and short windows. A dozen tokens pass
# these, whereas windows of ten thousands of tokens cannot be tried on the model itself. Every number of the
# configuration becomes small, as no list says which are lengths; known sizes shrink in proportion.

_OFFSET = 2  # entries before the first position, as in OPT's embeddings
PASSED = 12  # larger numbers shrink: a text of three dozen tokens is past twice as many
_NUMBER = 8  # replaces larger numbers that are not sizes
_WIDTH, _HEADS, _KV_HEADS, _VOCABULARY, _LAYERS = 32, 4, 2, 97, 8
POSITIONS = 256  # of a copy: so few that the proof's second text takes all of them
_ENDLESS = 1 << 62
_STANDARD_DEVIATION = 0.15  # of the weights: makes attention so uneven that a wrong mask changes the logits


class _Copy(NamedTuple):
    """Facts about a copy: query heads of the model, layers of the copy, tokens of the model's longest text."""

    heads: int | None
    layers: int
    longest: int


def _at_most(most: int) -> Callable[[int, _Copy], int]:
    return lambda value, of: min(value, most)


def _heads(value: int, of: _Copy) -> int:
    return _HEADS if value > _KV_HEADS else value  # the copy's width is a multiple of each


def _kv_heads(value: int, of: _Copy) -> int:
    return _heads(value, of) if value == of.heads else min(value, _KV_HEADS)


_SIZES: tuple[tuple[str, Callable[[int, _Copy], int]], ...] = (
    (r"(num_key_value_heads|kv_heads|num_query_groups)$", _kv_heads),
    (r"^(num_hidden_layers|n_layers?|num_layers|(num_)?decoder_layers)$", lambda value, of: of.layers or min(value, 2)),
    (r"^(mamba_(n|num)_heads|n_mamba_heads|linear_num_.*heads)$", _at_most(_NUMBER)),
    (r"^mamba_(d_head|headdim|head_dim|d_state|dt_rank)$|state_size$|^time_step_rank$", _at_most(_NUMBER)),
    (r"^(mamba_)?n_?groups$", _at_most(2)),
    (r"^(mamba_)?chunk_size$", _at_most(_NUMBER)),  # tokens that a kernel takes at once: not a window
    (r"^attn_layer_(offset|indices)$", lambda value, of: 1),
    (r"^attn_layer_period$", _at_most(2)),
    (r"^num_kv_shared_layers$", lambda value, of: of.layers // 2 if value else 0),
    (r"^(n_group|num_expert_group|topk_group)$", lambda value, of: 1),
    (
        r"(scalar|scale_emb|multiplier|dim_model_base|pretraining_tp|^seed|theta|^base|image_seq_length)$",
        lambda value, of: value,
    ),
    (r"(token_(id|ids|index)|_index|_id|token)$", _at_most(_VOCABULARY - 1)),
    (r"vocab_size", _at_most(_VOCABULARY)),
    (
        r"^(max_position_embeddings|max_target_positions|n_positions|n_ctx|seq_length|max_seq_len|model_max_length)$",
        _at_most(POSITIONS),
    ),
    (
        r"^(hidden_size|d_model|n_embd|emb_dim|embedding_(dim|size)|(in|out)put_embedding_size|word_embed_proj_dim)$",
        lambda value, of: _WIDTH if value else 0,
    ),
    (r"(attention_heads|^n_heads?|^num_heads|_n_heads)$", _heads),
    (r"(experts_per_tok(en)?|^moe_(k|topk|top_k)|^top_k_experts)$", _at_most(2)),
    (
        r"(intermediate_size.*|(_|^)dim(_.*)?|_rank|experts?|_inner|_d_ssm|hidden_size.*|head_size|_channels)$",
        lambda value, of: value if value <= PASSED else _NUMBER,
    ),
)
"""Names of sizes, and a copy's size instead of a model's. All other numbers may be lengths."""
_INNER = (
    ("num_heads", "head_dim", "expand"),
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
)
"""Heads of a state space layer, size of each, and the layer's width ÷ that of the model."""
_WINDOWS = re.compile(r"window|chunk|local|block|span|topk|floor")


def lengths_beyond(config: Any, longest: int | None) -> dict[str, int]:
    """Return possible lengths below `longest` in a decoder's configuration that short texts do not reach."""
    return {
        name: number
        for name, number in _numbers(config.to_dict())
        if PASSED < number < (longest or _ENDLESS) and not any(re.search(size, name) for size, _ in _SIZES)
    }


def has_table(model: nn.Module, longest: int | None) -> bool:
    """Return whether a model has an embedding or a buffer for each of its positions, and more of them than a copy."""
    if longest is None or longest <= POSITIONS:
        return False
    sizes = [size for buffer in model.buffers() for size in buffer.shape]
    sizes += [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
    return any(0 <= size - longest <= _OFFSET for size in sizes)


def names_window(name: str) -> bool:
    """Return whether a number of this name is certainly a length, such as a window."""
    return _WINDOWS.search(name) is not None


def small_copy(model: Any, longest: int | None) -> Any:
    """Build the copy of a model, on the CPU and in float32. May raise any error of the model's class."""
    attention = "eager" if model.config._attn_implementation == "eager" else "sdpa"
    return random_model(type(model), small_config(model.config, longest), attention)


def random_model(kind: Any, config: Any, attention: str = "sdpa") -> Any:
    """Build a model of class `kind` with reproducible random weights."""
    with transformers_loading(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model(partial(kind._from_config, config, dtype=torch.float32, attn_implementation=attention))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=_STANDARD_DEVIATION)
    return model.eval()


def small_config(config: Any, longest: int | None) -> Any:
    """Copy a whole model's configuration, and those inside it, with small sizes and lengths."""
    made = copy.deepcopy(config)
    inside = [getattr(made, name, None) for name in getattr(made, "sub_configs", None) or {}]
    for part in [made, *(part for part in inside if part is not None)]:
        if hasattr(part, "quantization_config"):
            delattr(part, "quantization_config")
        _shrink(part, longest or _ENDLESS)
    return made


def _shrink(config: Any, longest: int) -> None:
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    kept = _kept_layers(config, layers) if isinstance(layers, int) else []
    for name, before in list(vars(config).items()):
        value = before
        if name.startswith("_") or name in (getattr(config, "sub_configs", None) or {}):
            continue
        if isinstance(value, list | tuple) and kept and len(value) == layers:
            value = type(value)(value[layer] for layer in kept)
        small = _small(name, value, _Copy(heads, len(kept), longest))
        if small != before:
            setattr(config, name, small)
    if getattr(config, "qk_head_dim", None) and getattr(config, "qk_nope_head_dim", None):
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if getattr(config, "attention_hidden_size", None) and getattr(config, "attention_head_dim", None):
        config.attention_hidden_size = 2 * config.hidden_size
        config.attention_head_dim = config.attention_hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rope:  # the sizes of the three axes' parts of a head's rotated half
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
        config.rope_parameters = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    if getattr(config, "hybrid_layer_ids", None):
        config.hybrid_layer_ids = [number for number, kind in enumerate(config.layer_types) if kind == "hybrid"]
    for heads_name, dim_name, factor_name in _INNER:
        if all(isinstance(getattr(config, name, None), int) for name in (heads_name, dim_name, factor_name)):
            inner = getattr(config, factor_name) * config.hidden_size
            setattr(config, dim_name, inner // getattr(config, heads_name))
            if getattr(config, "mamba_d_ssm", None):
                config.mamba_d_ssm = inner


def _kept_layers(config: Any, layers: int) -> list[int]:
    """Return two layers, or the first of each kind, where the configuration lists each layer's kind."""
    lists = [one for one in vars(config).values() if isinstance(one, list | tuple) and len(one) == layers]
    first: dict[str, int] = {}
    for layer in range(layers):
        first.setdefault(repr([one[layer] for one in lists]), layer)
    kept = list(first.values())[:_LAYERS]
    kept += [layer for layer in range(layers) if layer not in kept][: max(0, 2 - len(kept))]
    kept.sort()
    # Layers that share the keys or the weights of others need some of each kind before them.
    shares = getattr(config, "num_kv_shared_layers", None) or any("hybrid" in one for one in lists)
    return kept + kept if shares else kept


def _small(name: str, value: Any, of: _Copy) -> Any:
    if isinstance(value, dict):
        return {key: _small(str(key), one, of) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_small(name, one, of) for one in value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for size, small in _SIZES:
        if re.search(size, name):
            return small(value, of)
    return value if value <= PASSED or value >= of.longest else _NUMBER


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _numbers(one, str(key))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield name, value
