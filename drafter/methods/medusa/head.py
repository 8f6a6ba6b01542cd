"""`medusa`: residual blocks on the last hidden state, each with an output layer (Cai et al. 2024, arXiv 2401.10774).

Published heads are read in the formats of FasterDecoding/Medusa and vLLM, and written in vLLM's.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from drafter.ctc.prefix_search import static_tree
from drafter.drafters.target import Target
from drafter.errors import LoadError
from drafter.heads.config import HeadConfig, Tree
from drafter.heads.frame_head import FrameHead, ResidualBlocks
from drafter.heads.losses import DraftBatch, Labels, LossSum, cross_entropy
from drafter.heads.published import Json, Layout, PublicHead, TargetOfExport, Weights, count, refuse_unfit, words
from drafter.tree.token_tree import TokenTree, best_product_trie


class MedusaHead(FrameHead):
    """`depth` heads that do not see each other's tokens."""

    algorithm = "medusa"
    config_class = HeadConfig
    config: HeadConfig
    no_static_tree = None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.module = ResidualBlocks(config.hidden_size, config.depth)
        self.outputs = nn.Parameter(
            torch.empty(config.depth, config.draft_vocab_size or config.vocab_size, config.hidden_size)
        )
        nn.init.normal_(self.outputs, std=config.hidden_size**-0.5)

    def start_from(self, base: Target) -> None:
        """Initialise every output layer with the target model's LM head."""
        with torch.no_grad():
            self.outputs.copy_(self.output(base).lm_head_weight.expand_as(self.outputs))

    def forward(self, base: Target, batch: DraftBatch, hidden: Tensor, labels: Labels) -> LossSum:
        real = batch.lengths > 0
        states = self.module(base.embed(batch.tokens), hidden, batch.anchors)[real]
        labels = self.in_draft_ids(batch, labels)[1][real]
        log_probs = self.log_probs(states).gather(2, labels.tokens)
        return cross_entropy(log_probs, labels, batch.lengths[real], self.config.depth_decay)

    def log_probs(self, states: Tensor) -> Tensor:
        """Return float32 log-probabilities `[N, F, V]` of the first F frame states `[N, F, d]`."""
        outputs = self.outputs[: states.shape[1]].to(states.dtype)
        logits = torch.bmm(states.transpose(0, 1), outputs.transpose(1, 2))
        return logits.transpose(0, 1).float().log_softmax(-1)

    def search(
        self, states: Tensor, recent: Tensor, base: Target, size: int, tree: Tree, least: float = 0.0
    ) -> TokenTree:
        if tree == "static":
            return static_tree(self.log_probs(states), recent[:, -1], self.config.depth, size, blank=False)
        return best_product_trie(self.log_probs(states), recent[:, -1], size)

    def frames_for(self, size: int, tree: Tree) -> int | None:
        return min(self.config.depth, size - 1) if tree == "exact" else None


def _recognises(config: Json) -> bool:
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def _read(name: str, config: Json, tensors: Weights, base: Target) -> PublicHead:
    published = "medusa_num_heads" in config
    depth = count(name, config, "medusa_num_heads" if published else "num_heads")
    layers = count(name, config, "medusa_num_layers" if published else "num_hidden_layers", 1)
    if layers != 1:
        raise LoadError(f"draft head {name!r} has {layers} residual blocks a head, and only one can be run")
    tensors = {key.removeprefix("medusa_head.").removeprefix("medusa_heads."): one for key, one in tensors.items()}
    block, bias, output = _names(published)
    # The configuration of FasterDecoding's first heads says two, but there are five.
    there = {place[1] for key in tensors if (place := re.match(r"(?:blocks\.)?(\d+)\.", key))}
    depth = max(depth, len(there))
    if output.format(0) not in tensors and block.format(0) in tensors:
        raise LoadError(
            f"draft head {name!r} has no output layers: it takes the target model's LM head, and only heads with "
            "output layers of their own can be run"
        )
    parts = (block, output, bias) if bias.format(0) in tensors else (block, output)
    refuse_unfit(name, [part.format(head) for head in range(depth) for part in parts], tensors, {"token_map"})
    first = tensors[output.format(0)]
    tokens = tensors.get("token_map")
    vocabulary = len(first) if tokens is None else count(name, config, "vocab_size")
    fields: dict[str, Any] = {"hidden_size": first.shape[1], "vocab_size": vocabulary, "depth": depth}
    fields["draft_vocab_size"] = None if tokens is None else len(tokens)
    found = {"outputs": torch.stack([tensors[output.format(head)] for head in range(depth)])}
    for head in range(depth):
        found[f"module.blocks.{head}.weight"] = tensors[block.format(head)]
        found[f"module.blocks.{head}.bias"] = tensors.get(bias.format(head), first.new_zeros(first.shape[1]))
    if tokens is not None:
        found["vocabulary.tokens"] = tokens.long()
    made_for = config.get("base_model_name_or_path")
    return PublicHead("Medusa" if published else "vLLM", "medusa", fields, found, made_for)


def _names(published: bool) -> tuple[str, str, str]:
    """Return name patterns of a head's block, its bias and its output layer."""
    if published:
        return "{0}.0.linear.weight", "{0}.0.linear.bias", "{0}.1.weight"
    return "blocks.{0}.layers.0.weight", "blocks.{0}.layers.0.bias", "lm_heads.{0}.weight"


def _export(shape: HeadConfig, tensors: Weights, base: TargetOfExport) -> tuple[dict[str, Any], Weights]:
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": base.name,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_heads": shape.depth,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "truncated_vocab_size": shape.draft_vocab_size or shape.vocab_size,
    }
    block, bias, output = _names(published=False)
    found = {}
    for head in range(shape.depth):
        found[block.format(head)] = tensors[f"module.blocks.{head}.weight"]
        found[bias.format(head)] = tensors[f"module.blocks.{head}.bias"]
        found[output.format(head)] = tensors["outputs"][head].clone()
    if shape.draft_vocab_size is not None:
        found["token_map"] = tensors["vocabulary.tokens"]
    return config, found


_KEYS = words(
    "hidden_size max_paths medusa_choices medusa_fc_bias medusa_num_heads medusa_num_layers num_heads "
    "num_hidden_layers topk truncated_vocab_size vocab_size"
)
LAYOUT = Layout("medusa", _KEYS, _recognises, _read, export=_export)
