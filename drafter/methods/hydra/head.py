"""`hydra`: sequentially dependent heads (Ankner et al. 2024, arXiv 2402.05109).

Head `u` reads the last hidden state and the embeddings of the pending token and of the `u - 1` draft tokens after it.
With `prefix_attention` (Hydra++) the hidden state first attends to the text through a transformer layer. Hydra++ also
has deeper heads. Published heads are read in the format of zankner/Hydra, without prefix attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafter.ctc.lattice import LATTICE_BEAM, best_lattice_trie
from drafter.drafters.target import Target
from drafter.heads.attention import AttentionModule
from drafter.heads.config import HeadConfig, Tree, check_even_heads, check_sizes
from drafter.heads.frame_head import DraftModule, FrameHead, LastHidden, last_tokens
from drafter.heads.losses import DraftBatch, Labels, LossSum, chosen_log_probs, cross_entropy
from drafter.heads.published import Json, Layout, PublicHead, Weights, count, refuse_others, refuse_unfit
from drafter.tree.token_tree import TokenTree


@dataclass(frozen=True)
class HydraHeadConfig(HeadConfig):
    """Shape of Hydra heads, `depth` in number.

    Args:
        num_layers: Layers of each head's MLP: 1 for Hydra, 4 for Hydra++.
        prefix_attention: Whether a transformer layer over the text comes before the heads, as in Hydra++.
        num_heads: Attention heads of that layer; each has an even width.
        intermediate_size: Inner width of that layer's gated MLP.
        rope_theta: Base of that layer's rotary positions.
        own_outputs: Whether heads are as published: each has an output layer of its own and a linear map instead of the
            first layer's residual path, without norms.
    """

    num_layers: int = 1
    prefix_attention: bool = False
    num_heads: int = 4
    intermediate_size: int = 704
    rope_theta: float = 10_000.0
    own_outputs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "num_layers", "num_heads", "intermediate_size", "rope_theta")
        if self.prefix_attention:
            check_even_heads(self)


class _Mlp(nn.Module):
    """One head. Layers are residual: the first one to the state or, if `mapped`, to a linear map of its input."""

    def __init__(self, width: int, inputs: int, num_layers: int, mapped: bool) -> None:
        super().__init__()
        self.residual = nn.Linear(inputs * width, width) if mapped else None
        self.first = nn.Linear(inputs * width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers - 1))

    def forward(self, state: Tensor, path: Tensor) -> Tensor:
        """Return `[..., d]` for a state `[..., d]` and a path `[..., u · d]`."""
        both = torch.cat([state, path], -1)
        mixed = (state if self.residual is None else self.residual(both)) + F.silu(self.first(both))
        for layer in self.layers:
            mixed = mixed + F.silu(layer(mixed))
        return mixed


class HydraHead(FrameHead):
    """Heads that each see the path so far."""

    algorithm = "hydra"
    config_class = HydraHeadConfig
    config: HydraHeadConfig
    no_static_tree = "the static tree needs heads that do not depend on the path: Hydra's do"

    def __init__(self, config: HydraHeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.module: DraftModule = LastHidden()
        if config.prefix_attention:
            self.module = AttentionModule(width, 1, 1, config.num_heads, config.intermediate_size, config.rope_theta)
        mapped = config.own_outputs
        self.embedding_norm = nn.Identity() if mapped else nn.LayerNorm(width)
        self.heads = nn.ModuleList(_Mlp(width, u + 2, config.num_layers, mapped) for u in range(config.depth))
        self.norm = nn.Identity() if mapped else nn.LayerNorm(width)
        ids = config.draft_vocab_size or config.vocab_size
        self.outputs = nn.ModuleList(nn.Linear(width, ids) for _ in range(config.depth if mapped else 0))

    def start_from(self, base: Target) -> None:
        """Initialise the heads' own output layers with the target model's LM head."""
        with torch.no_grad():
            for output in self.outputs:
                assert isinstance(output, nn.Linear)
                output.weight.copy_(self.output(base).lm_head_weight)
                output.bias.zero_()

    def forward(self, base: Target, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        drafted, labels = self.in_draft_ids(batch, labels)
        real = drafted.lengths > 0
        state = self.module(base.embed(batch.tokens), hidden, batch.anchors)[real][:, 0]
        text = torch.cat([last_tokens(batch.tokens, batch.anchors, 1)[real], batch.targets[real]], 1)
        path = self.embedding_norm(base.embed(text)).flatten(1)
        width = self.config.hidden_size
        states = [head(state, path[:, : (u + 1) * width]) for u, head in enumerate(self.heads)]
        labels = labels[real]
        if self.outputs:
            logits = torch.stack([output(one) for output, one in zip(self.outputs, states, strict=True)], 1)
            log_probs = logits.float().log_softmax(-1).gather(2, labels.tokens)
        else:
            log_probs = chosen_log_probs(self.output(base), self.norm(torch.stack(states, 1)), labels.tokens)
        return cross_entropy(log_probs, labels, drafted.lengths[real], self.config.depth_decay)

    def search(
        self, states: Tensor, recent: Tensor, base: Target, size: int, tree: Tree, least: float = 0.0
    ) -> TokenTree:
        model, depth = _Paths(self, base, states[:, 0], recent), self.config.depth
        return best_lattice_trie(model, recent[:, -1], depth, 1, depth, size, LATTICE_BEAM, least)


class _Paths:
    """`LabelModel` of the heads. A path's state is its target-vocabulary token ids, the root's first."""

    def __init__(self, head: HydraHead, base: Target, states: Tensor, recent: Tensor) -> None:
        self._head, self._base, self._states, self._root = head, base, states, recent[:, -1:]

    def start(self) -> Tensor:
        return self._root

    def score(self, first: int, stop: int, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        path = self._head.embedding_norm(self._base.embed(state)).flatten(1)
        states = self._head.norm(self._head.heads[first](self._states[rows], path))
        output = self._head.outputs[first] if self._head.outputs else self._head.output(self._base).lm_head
        shares = output(states)[:, None].float().softmax(-1)
        return shares, torch.zeros(shares.shape[:2], device=shares.device)

    def extend(self, state: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([state, self._head.base_tokens(tokens)[:, None]], 1)


def _read(name: str, config: Json, tensors: Weights, base: Target) -> PublicHead:
    refuse_others(name, {"grounded_heads": False, **config}, _ONLY)
    depth, layers = count(name, config, "hydra_num_heads"), count(name, config, "hydra_num_layers", 1)
    names: dict[str, str] = {}
    for head in range(depth):
        for part in ("weight", "bias"):
            mlp = f"hydra_mlp.{head}"
            names[f"heads.{head}.residual.{part}"] = f"{mlp}.0.res_connection.{part}"
            names[f"heads.{head}.first.{part}"] = f"{mlp}.0.linear.{part}"
            names |= {f"heads.{head}.layers.{i}.{part}": f"{mlp}.{i + 1}.linear.{part}" for i in range(layers - 1)}
            names[f"outputs.{head}.{part}"] = f"hydra_lm_head.{head}.{part}"
    refuse_unfit(name, list(names.values()), tensors)
    vocabulary, width = tensors["hydra_lm_head.0.weight"].shape
    sizes = {"hidden_size": width, "vocab_size": vocabulary, "depth": depth, "num_layers": layers}
    found = {ours: tensors[theirs] for ours, theirs in names.items()}
    made_for = config.get("base_model_name_or_path")
    return PublicHead("Hydra", "hydra", {**sizes, "own_outputs": True}, found, made_for)


_ONLY = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
_KEYS = frozenset({*_ONLY, "hydra_num_heads", "hydra_num_layers"})
LAYOUT = Layout("hydra", _KEYS, lambda config: "hydra_num_heads" in config, _read)
