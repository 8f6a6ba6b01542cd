"""A base's token embeddings, read from its files without loading the rest of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from drafter.base.architecture import transformers_loading
from drafter.base.loading import INDEX, WEIGHTS, read_weight_map
from drafter.hub import hub_file


def base_embeddings(model: str, config: Any, *, trust_remote_code: bool = False) -> Tensor | None:
    """Return the token embeddings `[V, d]`; None if they cannot be told from the other tensors of the model's files.

    Args:
        model: Hub id or folder.
        config: Its configuration, of transformers.
        trust_remote_code: Run modeling code that comes with it.
    """
    with transformers_loading(), torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    wanted = skeleton.get_input_embeddings().weight
    name = next((name for name, one in skeleton.named_parameters() if one is wanted), None)
    index = _file(model, INDEX)
    shard = WEIGHTS if index is None else read_weight_map(model, index).get(name or "")
    file = None if shard is None else _file(model, shard)
    if file is None or name is None:
        return None
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name) if name in tensors.keys() else None  # noqa: SIM118 - it is no mapping


def _file(model: str, name: str) -> Path | None:
    if (folder := Path(model).expanduser()).is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return hub_file(model, name)
    except (OSError, ValueError):
        return None
