"""A GGUF file becomes a folder that transformers loads: bf16 safetensors, tokeniser, chat template.

transformers reads the file with the package `gguf`, and brings weights and names into its own order. What it leaves
undone is done here: its model still calls itself quantised.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from drafter.gguf_files import metadata_read_once
from drafter.target_model.architecture import transformers_loading
from drafter.text.tokenizers import load_tokenizer


@metadata_read_once()
def dequantise(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder.

    Args:
        gguf: The file. Its weights are dequantised in fp32 and rounded to bf16.
        folder: A new folder.
    """
    tokenizer = load_tokenizer(gguf)
    with transformers_loading():
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    # A model that was loaded from a GGUF file refuses to be saved; one that was given the same weights does not.
    del config.quantization_config
    config.dtype = torch.bfloat16
    with transformers_loading():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
