"""Small draft heads of every kind, and texts for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafter.heads.checkpoint import new_head
from drafter.heads.contract import DraftHead
from drafter.heads.losses import DraftBatch, LossSum, hard_labels
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.training.targets import RegeneratedText, base_hidden_states

DEPTH = 4

_ATTENTION: dict[str, Any] = {"num_heads": 2, "intermediate_size": 40}
_CTC: dict[str, Any] = {**_ATTENTION, "num_frames": 5, "joint_size": 24}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ctc": ("ctc", _CTC),
    "ctc, paper's loss": ("ctc", {**_CTC, "loss": "ctc"}),
    "ctc, cross-entropy": ("ctc", {**_CTC, "loss": "ce", "num_frames": DEPTH}),
    "ctc, linear": ("ctc", {**_CTC, "module": "linear"}),
    "ctc, linear, cross-entropy": ("ctc", {**_CTC, "module": "linear", "loss": "ce", "num_frames": DEPTH}),
    "ctc, 2 layers": ("ctc", {**_CTC, "num_layers": 2}),
    "ctc, causal": ("ctc", {**_CTC, "causal": True, "num_layers": 2}),
    "parallel + markov": ("ctc", {**_CTC, "num_frames": DEPTH, "label_context": 1, "band": 1}),
    "causal parallel": ("ctc", {**_CTC, "num_frames": DEPTH, "label_context": 1, "band": 1, "causal": True}),
    "context 1": ("ctc", {**_CTC, "label_context": 1}),
    "context 2": ("ctc", {**_CTC, "label_context": 2, "band": 3, "joint_layers": 2}),
    "context 4": ("ctc", {**_CTC, "label_context": 4, "band": 1}),
    "context 2, in part": ("ctc", {**_CTC, "label_context": 2, "draft_vocab_size": 90}),
    "medusa": ("medusa", {}),
    "medusa, in part": ("medusa", {"draft_vocab_size": 90}),
    "hydra": ("hydra", _ATTENTION),
    "eagle3": ("eagle3", {**_ATTENTION, "num_kv_heads": 1}),
    "eagle3, in part": ("eagle3", {**_ATTENTION, "draft_vocab_size": 90, "norm_before_residual": True}),
    "eagle3, normed": ("eagle3", {**_ATTENTION, "fusion_norm": "each", "qk_norm": True, "norm_output": True}),
    "specformer": ("specformer", _ATTENTION),
    "specformer, in part": ("specformer", {**_ATTENTION, "draft_vocab_size": 90}),
    "hydra, own outputs": ("hydra", {"own_outputs": True, "num_layers": 2}),
    "hydra++": ("hydra", {**_ATTENTION, "prefix_attention": True, "num_layers": 4}),
}
"""Algorithm and settings of every kind of head, by a name for people."""

MAIN_KINDS = (
    "ctc",
    "ctc, paper's loss",
    "parallel + markov",
    "context 2, in part",
    "medusa",
    "hydra++",
    "eagle3, in part",
    "specformer",
)
"""Kinds that differ most: each algorithm, loss and module, with and without a draft vocabulary."""

STATIC = tuple(
    kind
    for kind, (algorithm, settings) in KINDS.items()
    if algorithm not in ("hydra", "eagle3", "specformer") and not settings.get("label_context")
)
"""The kinds that have the published tree too."""

COUNTS = torch.ones(97, dtype=torch.long)
"""How often each token occurs: draft vocabularies have the lowest ids."""


def untrained_head(base: BaseModel, kind: str, seed: int = 0, **settings: Any) -> DraftHead:
    """Return a head of depth `DEPTH` as it is before training."""
    torch.manual_seed(seed)
    algorithm, own = KINDS[kind]
    return new_head(algorithm, base, {"depth": DEPTH, **own, **settings}, COUNTS)


def make_head(base: BaseModel, kind: str, seed: int = 0, **settings: Any) -> DraftHead:
    """Return a head in evaluation mode, none of whose weights is zero or the base's own."""
    head = untrained_head(base, kind, seed, **settings)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head.eval().requires_grad_(False)


def sequence(
    base: BaseModel, rows: int, length: int, seed: int = 0, layers: tuple[int, ...] = (LM_HEAD_INPUT,)
) -> tuple[Tensor, Tensor]:
    """Return random tokens `[rows, length]` and the base's hidden states of them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, base.vocab_size, (rows, length), generator=generator)
    return tokens, base_hidden_states(base, tokens, layers)


def random_texts(count: int, length: int = 14) -> list[RegeneratedText]:
    """Return random texts with prompts of three tokens. Each text is one token shorter than the text before it."""
    generator = torch.Generator().manual_seed(0)
    return [RegeneratedText(torch.randint(3, 97, (length - i,), generator=generator).tolist(), 3) for i in range(count)]


def text_loss(head: DraftHead, base: BaseModel, batch: DraftBatch) -> LossSum:
    """Return the loss of a head with the text itself as labels."""
    hidden = base_hidden_states(base, batch.tokens, head.hidden_layers)
    return head(base, batch, hidden, hard_labels(batch.targets))  # type: ignore[no-any-return]
