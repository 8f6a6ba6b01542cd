from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from drafter.heads.published import base_embeddings
from drafter.target_model.model import BaseModel


def test_embeddings_are_read_from_the_bases_files(tiny_base: BaseModel, tmp_path: Path) -> None:
    """From one file or from several; and not guessed where they have another name."""
    expected = tiny_base.embed(torch.arange(tiny_base.vocab_size))
    for name, size in (("whole", "1GB"), ("sharded", "10KB")):
        tiny_base.model.save_pretrained(tmp_path / name, max_shard_size=size)
        found = base_embeddings(str(tmp_path / name), tiny_base.model.config)
        assert found is not None
        assert torch.equal(found, expected)
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    save_file({"other": torch.zeros(1)}, tmp_path / "whole" / "model.safetensors")
    assert base_embeddings(str(tmp_path / "whole"), tiny_base.model.config) is None
