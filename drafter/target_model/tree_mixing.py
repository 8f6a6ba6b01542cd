"""A mixer's code over a whole draft tree: its kernels for texts are replaced by those for trees.

The replaced names are looked up in a copy of the function, so that the model's module stays as it is for other models
and threads. They give the numbers of the mixer's code for one token after the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from drafter.target_model.state_cache import Chosen, Key, States
from drafter.target_model.tree_scan import TreePaths, TreeScan, convolution_windows, delta_values, path_sums

_CONV: Key = ("conv", 0)
_RECURRENT: Key = ("recurrent", 0)
_NAMES = {
    "causal_conv1d_fn": "convolve",
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "scan",
}
"""Kernels in transformers' modules, and the methods of `TreeRun` that replace them."""


class TreeRun:
    """One run of a mixer over a tree. It is the cache that the mixer sees, and has the kernels that it calls."""

    def __init__(self, paths: TreePaths, states: States) -> None:
        self._paths, self._states = paths, states
        self.after: dict[Key, Chosen] = {}
        self.node_bytes = self.row_bytes = 0  # that `after` keeps, by node and by row

    # ---- the cache

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor:
        return self._states["conv", state_idx]

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self._states.get(("recurrent", state_idx))

    def update_conv_state(self, inputs: Tensor, *args: Any, **others: Any) -> Tensor:
        return inputs

    def update_recurrent_state(self, state: Tensor, *args: Any, **others: Any) -> Tensor:
        return state

    def is_recording_past(self, layer: int) -> bool:
        return False

    # ---- the kernels

    def convolve(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
    ) -> Tensor:
        """Convolve inputs `[B, C, N]` along the paths with weights `[C, k]`."""
        windows = convolution_windows(inputs, self._states[_CONV], self._paths)
        self.after[_CONV] = lambda row, node: windows[row, :, node]
        self.node_bytes += windows.nbytes
        output = torch.einsum("bcnk,ck->bcn", windows.to(weight.dtype), weight)
        if bias is not None:
            output = output + bias[:, None]
        return (output if activation is None else ACT2FN[activation](output)).to(inputs.dtype)

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Apply the gated delta rule to queries and keys `[B, N, H', K]`, values `[B, N, H, V]` and rates `[B, N, H]`.

        `g` `[B, N, H]` are log decays, or `[B, N, H, K]`.
        """
        groups = value.shape[2] // key.shape[2]
        query, key = (one.repeat_interleave(groups, 2) for one in (query, key))
        queries, keys, values = (one.transpose(1, 2).float() for one in (query, key, value))
        if use_qk_l2norm_in_kernel:
            queries, keys = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (queries, keys))
        decays = (g if g.dim() == 4 else g[..., None]).transpose(1, 2).float()
        ancestors, state = self._paths.ancestors.to(value.device), initial_state.float()
        sums, rates = path_sums(decays, ancestors), beta[..., None].transpose(1, 2).float()
        written = delta_values(state, keys, values, rates, sums, ancestors)
        scan = TreeScan(state, keys, written, sums, ancestors)
        self.after[_RECURRENT] = scan.after
        self._count(scan)
        read = scan.read(queries * queries.shape[-1] ** -0.5)
        return read.transpose(1, 2).to(query.dtype), initial_state

    def scan(
        self,
        hidden: Tensor,
        dt: Tensor,
        rates: Tensor,
        written: Tensor,
        read: Tensor,
        chunk_size: int,
        D: Tensor | None = None,  # noqa: N803 - a keyword of transformers' kernel
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        return_final_states: bool = False,
        **others: Any,
    ) -> Any:
        """Apply Mamba 2's state space to inputs `[B, N, H, P]` and steps `dt` `[B, N, H]`.

        `rates` `[H]` are the paper's A, `written` and `read` `[B, N, G, K]` its B and C. The limits of steps that the
        model's code has for texts are left out, as it does for single tokens.
        """
        assert initial_states is not None
        groups = hidden.shape[2] // written.shape[2]
        keys, queries = (one.repeat_interleave(groups, 2).transpose(1, 2).float() for one in (written, read))
        steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        steps = (F.softplus(steps) if dt_softplus else steps).transpose(1, 2)[..., None].float()
        ancestors, inputs = self._paths.ancestors.to(hidden.device), hidden.transpose(1, 2).float()
        sums = path_sums(steps * rates.float()[:, None, None], ancestors)
        scan = TreeScan(initial_states.mT.float(), keys, inputs * steps, sums, ancestors)
        self.after[_RECURRENT] = lambda row, node: scan.after(row, node).mT
        self._count(scan)
        found = scan.read(queries)
        if D is not None:
            found = found + inputs * D.float()[:, None, None]
        output = found.transpose(1, 2).contiguous().to(hidden.dtype)
        return (output, initial_states) if return_final_states else output

    def _count(self, scan: TreeScan) -> None:
        self.node_bytes += scan.node_bytes
        self.row_bytes += scan.state.nbytes  # in float32, a copy of the states before the step


class TreeMixing:
    """A copy of a mixer's code that runs over trees."""

    def __init__(self, module: nn.Module, cache_name: str) -> None:
        self._module, self._cache_name = module, cache_name
        function = inspect.unwrap(type(module).forward)
        assert isinstance(function, FunctionType)
        kernels = {name: self._kernel(method) for name, method in _NAMES.items() if name in function.__globals__}
        self._function = FunctionType(
            function.__code__,
            {**function.__globals__, **kernels},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        self._function.__kwdefaults__ = function.__kwdefaults__
        self._run: TreeRun | None = None

    def __call__(self, hidden: Tensor, states: States, paths: TreePaths) -> tuple[Tensor, TreeRun]:
        """Run nodes `[B, N, d]` behind texts of these states; return the outputs, and the run with their states."""
        run = self._run = TreeRun(paths, states)
        try:
            output: Tensor = self._function(self._module, hidden, **{self._cache_name: run})
        finally:
            self._run = None
        return output, run

    def _kernel(self, method: str) -> Callable[..., Any]:
        return lambda *args, **others: getattr(self._run, method)(*args, **others)
