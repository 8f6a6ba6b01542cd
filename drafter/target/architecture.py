"""Facts from a model's configuration (support, attention, longest text), its fingerprint, and the lock for loading."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafter.errors import LoadError

_MAKING = threading.RLock()
TIE_WEIGHTS, _LINSPACE = PreTrainedModel.tie_weights, torch.linspace
_ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


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


def refuse_unsupported(name: str, config: Any) -> None:
    """Refuse architectures that a KV cache with a tree mask cannot decode, before their weights are read.

    Raises:
        LoadError: An encoder-decoder, a model with recurrent or linear-attention layers, or no causal LM at all.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise LoadError(
            f"{name}: {config.model_type} is an encoder-decoder model; only decoder-only models can be a target model"
        )
    text = config.get_text_config(decoder=True)
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_KINDS)
    if foreign:
        raise LoadError(
            f"{name}: {config.model_type} has {', '.join(foreign)} layers, whose state cannot be rolled back to an "
            "accepted path; only softmax-attention models can be a target model"
        )
    if missing := [one for one in ("num_hidden_layers", "vocab_size") if not isinstance(getattr(text, one, None), int)]:
        raise LoadError(f"{name}: the configuration of {config.model_type} has no {' and no '.join(missing)}")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not getattr(config, "auto_map", None):
        raise LoadError(f"{name}: {config.model_type} is not a causal language model that transformers knows")


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
    """Return window and chunk, in tokens, of each kind of attention in a decoder, by transformers' name of the kind."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = {"sliding_attention" if sliding else "full_attention"}
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
    of_layers = getattr(config, "layer_types", None) or [next(iter(kinds))] * config.num_hidden_layers
    return frozenset(number for number, kind in enumerate(of_layers) if kinds[kind] == (None, None))


_SCHEME = "v2-"
"""Prefix of fingerprints. Those of the first scheme are 16 hex digits alone."""
_SAMPLED = 1 << 14
"""Largest number of values hashed per tensor."""
_TINY = 2.0**-16
"""Smaller values count as zero: fp16 does not hold them as exactly as bf16 does."""
_SAMPLED_FIRST = 4096
"""Values of the embedding that the first scheme hashes."""


def fingerprint(model: nn.Module, sizes: Sequence[Any]) -> str:
    """Return `v2-` and 16 hex digits of a hash of a model's `sizes`, parameters and buffers.

    Small tensors are hashed in whole, large ones sampled evenly. Values are rounded to bf16, so that fp32 and bf16
    loads agree, and fp16 ones of a model saved in half precision.
    """
    digest = hashlib.sha256(repr(list(sizes)).encode())
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):  # quantised layers may add other objects
            digest.update(repr(list(tensor.shape)).encode())
            digest.update(_bytes(_sample(tensor)))
    return _SCHEME + digest.hexdigest()[:16]


def is_of_first_scheme(given: str) -> bool:
    return not given.startswith(_SCHEME)


def first_fingerprint(model: nn.Module, embedding: Tensor, sizes: Sequence[Any]) -> str:
    """Return the fingerprint of the first scheme, which draft heads and texts of earlier releases name.

    It covers a sample of the embedding `[V, d]`, all norms and all biases.
    """
    digest = hashlib.sha256(repr(list(sizes)).encode())
    flat = embedding.flatten()
    # Clamped, because float32 rounds the last index up where the embedding is large.
    places = torch.linspace(0, flat.numel() - 1, _SAMPLED_FIRST, dtype=torch.float32).long().clamp_max(flat.numel() - 1)
    vectors = [p.detach().flatten() for _, p in sorted(model.named_parameters()) if p.dim() == 1]
    for tensor in [flat[places.to(flat.device)], *vectors]:
        digest.update(tensor.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    if len(flat) <= _SAMPLED:
        return flat
    places = torch.arange(_SAMPLED, device=flat.device) * (len(flat) - 1) // (_SAMPLED - 1)
    return flat[places]


def _bytes(values: Tensor) -> bytes:
    values = values.cpu()
    if values.is_floating_point():
        values = values.to(torch.bfloat16)
        values = values.masked_fill(values.abs() < _TINY, 0.0).view(torch.int16)
    return values.numpy().tobytes()
