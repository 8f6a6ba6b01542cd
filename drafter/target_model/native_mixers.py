"""Mixers that the native library runs, each described by its modules, as blocks are in `blocks`.

A wrong description is found at load, where logits are compared with those of the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drafter.native.build import PackedWeights, UnsuitableError, library
from drafter.native.mixing import DELTA, MAMBA, PLAIN, SELECTIVE, MixerLayer, MixerStruct, kept_width, mix
from drafter.target_model.state_cache import StateCache, StateView

_GROUPED = "fix_query_key_value_ordering"
"""Method of Qwen3-Next's mixers that takes outputs of its linear layers apart, as they are grouped by key heads."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A mixer in the library's terms."""

    inside: Tensor  # `[*, d]` weights of the first linear layers
    bias: Tensor | None = None  # `[*]`
    order: Tensor  # of their outputs, as the library's structure has them
    convolution: Any
    out: Any  # the last linear layer
    norm: Any = None  # of the output
    select: Any = None  # by Mamba 1: the linear layer of steps, keys and queries
    step: Any = None  # and that from these steps to those of values
    select_norms: Tensor | None = None  # `[*]` weights of their norms
    sizes: dict[str, int]  # the numbers of the library's structure
    settings: dict[str, Any]  # others


def _delta(module: Any, inside: tuple[str, ...], out: str, norm: str, twice: str = "") -> Description:
    """Describe a mixer of the gated delta rule by names of its modules.

    Args:
        inside: Linear layers that give channels, gates, rates and steps, in this order.
        twice: A setting by which rates reach 2.
    """
    keys, heads = module.num_k_heads * module.head_k_dim, module.num_v_heads
    if module.conv1d.bias is not None:
        raise UnsuitableError("its convolution has a bias")
    places = torch.arange(module.conv_dim + module.value_dim + 2 * heads)
    others, rates, steps = places.split([len(places) - 2 * heads, heads, heads])
    order = [others, steps, rates]
    if (parted := getattr(module, _GROUPED, None)) is not None:
        grouped = places[None, None, : -2 * heads], places[None, None, -2 * heads :]
        query, key, value, gate, rate, step = (part.flatten() for part in parted(*grouped))
        order = [query, key, value, gate, step, rate]
    return Description(
        inside=torch.cat([getattr(module, name).weight for name in inside]),
        order=torch.cat(order),
        convolution=module.conv1d,
        out=getattr(module, out),
        norm=getattr(module, norm),
        sizes={
            "key_heads": module.num_k_heads,
            "heads": heads,
            "key_size": module.head_k_dim,
            "value_size": module.head_v_dim,
            "key_at": keys,
            "value_at": 2 * keys,
            "normed": module.head_v_dim,
        },
        settings={
            "epsilon": _epsilon(getattr(module, norm)),
            "rate": 2 if twice and getattr(module, twice) else 1,
            "rule": DELTA,
        },
    )


def _mamba2(module: Any) -> Description:
    """Describe a mixer of Mamba 2, whose modules have the same names in all families."""
    inner, keys, heads = module.intermediate_size, module.n_groups * module.ssm_state_size, module.num_heads
    gates, channels, steps = torch.arange(inner + module.conv_dim + heads).split([inner, module.conv_dim, heads])
    weight, bias = module.in_proj.weight, module.in_proj.bias
    if hasattr(module, "mup_vector"):  # Falcon-H1 scales what goes in, and each kind of what comes out
        scale = module.mup_vector.flatten()
        weight, bias = weight * module.ssm_in_multiplier * scale[:, None], None if bias is None else bias * scale
    norm = module.norm if hasattr(module.norm, "weight") else None
    normed = 0 if norm is None else getattr(norm, "group_size", None) or inner // norm.n_groups
    least, most = module.time_step_limit
    return Description(
        inside=weight,
        bias=bias,
        order=torch.cat([channels, gates, steps]),
        convolution=module.conv1d,
        out=module.out_proj,
        norm=norm,
        sizes={
            "key_heads": module.n_groups,
            "heads": heads,
            "key_size": module.ssm_state_size,
            "value_size": module.head_dim,
            "query_at": inner + keys,
            "key_at": inner,
            "normed": normed,
        },
        settings={
            "epsilon": _epsilon(norm),
            "gate_first": not getattr(norm, "norm_before_gate", False),
            "least": least,
            "most": most,
            "rule": MAMBA,
        },
    )


def _mamba(module: Any) -> Description:
    """Describe a mixer of Mamba 1, with or without norms of steps, keys and queries."""
    widths = (module.time_step_rank, module.ssm_state_size, module.ssm_state_size)
    norms = [getattr(module, f"{kind}_layernorm", None) for kind in ("dt", "b", "c")]
    parts = [norm.weight[:width] for norm, width in zip(norms, widths, strict=True) if norm is not None]
    return Description(
        inside=module.in_proj.weight,
        bias=module.in_proj.bias,
        order=torch.arange(module.in_proj.out_features),
        convolution=module.conv1d,
        out=module.out_proj,
        select=module.x_proj,
        step=module.dt_proj,
        select_norms=torch.cat(parts) if parts else None,
        sizes={
            "key_heads": 1,
            "heads": 1,
            "key_size": module.ssm_state_size,
            "value_size": module.intermediate_size,
        },
        settings={"epsilon": _epsilon(norms[0]), "rule": SELECTIVE},
    )


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0)))


def _convolution(module: Any) -> Description:
    """Describe a mixer that is a short convolution between two gates."""
    gates_in, gates_out, channels = torch.arange(module.in_proj.out_features).chunk(3)
    return Description(
        inside=module.in_proj.weight,
        bias=module.in_proj.bias,
        order=torch.cat([channels, gates_out, gates_in]),
        convolution=module.conv,
        out=module.out_proj,
        sizes={"heads": 0, "value_size": 0},
        settings={"rule": PLAIN},
    )


_QWEN = partial(_delta, inside=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), out="out_proj", norm="norm")
MIXERS: Mapping[str, Callable[[Any], Description]] = {
    "Qwen3NextGatedDeltaNet": partial(_delta, inside=("in_proj_qkvz", "in_proj_ba"), out="out_proj", norm="norm"),
    "Qwen3_5GatedDeltaNet": _QWEN,
    "Qwen3_5MoeGatedDeltaNet": _QWEN,
    "OlmoHybridGatedDeltaNet": partial(
        _delta,
        inside=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
        out="o_proj",
        norm="o_norm",
        twice="allow_neg_eigval",
    ),
    "Mamba2Mixer": _mamba2,
    "BambaMixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
    "Zamba2MambaMixer": _mamba2,
    "MambaMixer": _mamba,
    "FalconMambaMixer": _mamba,
    "JambaMambaMixer": _mamba,
    "Lfm2ShortConv": _convolution,
    "Lfm2MoeShortConv": _convolution,
    "Lfm3ShortConv": _convolution,
}
"""Description by the name of the mixer's class."""


class NativeMixer:
    """Runs one mixer natively, with a copy of its weights.

    Raises `BuildError` if the library cannot be compiled here, and `UnsuitableError` if it has no kernel for the mixer.

    Attributes:
        transposed: The library has the state `[K, V]` of a head as the transposed one of the model's code.
        node_bytes: What is kept of a node until its step is committed.
    """

    def __init__(self, module: Any, layer: int) -> None:
        kind = type(module).__name__
        if kind not in MIXERS:
            raise UnsuitableError(f"{kind} is not one of {', '.join(MIXERS)}")
        for one in module.parameters():
            if type(one) is not nn.Parameter or one.device.type != "cpu" or one.dtype != torch.float32:
                raise UnsuitableError("its weights are quantised, or not all float32 on a CPU")
        if getattr(module, "activation", "silu") != "silu" or hasattr(module, "_hf_hook"):
            raise UnsuitableError("its convolution has another activation than silu, or its weights move")
        self._layer, self._weights, one = layer, PackedWeights(), MIXERS[kind](module)
        if one.sizes["value_size"] % library().drafter_lanes():
            raise UnsuitableError(f"its heads have {one.sizes['value_size']} values")
        weights, taps = self._weights, one.convolution.weight[:, 0].T
        norms = [] if one.norm is None else [one.norm.weight] * (one.out.in_features // len(one.norm.weight))
        self.struct = MixerStruct(
            inside=weights.matrix(one.inside, one.bias, one.order),
            out=weights.matrix(one.out.weight, one.out.bias),
            taps=weights.address(taps),
            taps_bias=weights.address(one.convolution.bias),
            step_bias=weights.address(getattr(module, "dt_bias", None)),
            skip=weights.address(getattr(module, "D", None)),
            norm=weights.address(torch.cat(norms) if norms else None),
            select_norms=weights.address(one.select_norms),
            reach=taps.shape[0],
            channels=taps.shape[1],
            **{"most": torch.inf, **one.sizes, **one.settings},
        )
        if hasattr(module, "A_log"):  # of each head, or `[V, K]`
            self.struct.decays = weights.address(-module.A_log.exp().t())
        if one.select is not None:
            self.struct.select = weights.matrix(one.select.weight)
            self.struct.step = weights.matrix(one.step.weight, one.step.bias)
        self.transposed = one.settings["rule"] in (MAMBA, SELECTIVE)
        self.node_bytes = 4 * kept_width(self.struct)

    def over(self, cache: StateCache) -> MixerLayer:
        """Return this mixer over its states in a cache."""
        buffers = cache.buffers[self._layer]
        return MixerLayer(self.struct, buffers["conv", 0], buffers.get(("recurrent", 0)))

    def room(self, view: StateView) -> Tensor:
        """Return room for what is kept of the nodes of a forward until its commit."""
        layer = self.over(view.cache)
        kept = layer.room(view.texts)
        if view.texts.is_tree:
            view.cache.kept.append((layer, kept))
        return kept

    def __call__(self, view: StateView, hidden: Tensor) -> Tensor:
        """Run the nodes of a forward, `[B, N, d]` or packed `[1, M, d]`; return as many."""
        return mix(self.over(view.cache), view.texts, hidden, self.room(view))
