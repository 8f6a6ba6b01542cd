"""Checkpoints as quantising packages write them, each of a small random model, loaded as a target model and decoded.

`docs/formats.md` is written by::

    python -m tests.support.formats docs/formats.md
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafter.errors import LoadError
from drafter.requests import Request, SamplingParams
from drafter.target_model.architecture import transformers_loading
from drafter.target_model.formats import compute_in_fp32
from drafter.target_model.loading import load_base
from tests.support.gguf_files import tiny_llama, write_gguf
from tests.support.models import (
    OracleDrafter,
    generate_reference,
    plainly,
    random_model,
    random_prompts,
    run_engine,
    texts_of,
    tokens_of,
)

_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_NEW = 12
_WHY = re.compile(r" is quantised by [^,]*, and (.*): load it dequantised")
_BEGIN, _END = "<!-- formats -->", "<!-- /formats -->"  # of the table in the page
Outcome = Literal["equal", "refused", "differs"]


@dataclass(frozen=True)
class Format:
    """How a checkpoint is stored.

    Args:
        make: Writes one into a folder that holds a `dense` one; returns what is loaded.
        packages: What that takes, and loading it, by the names of modules.
    """

    make: Callable[[Path], Path]
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Tried:
    """What became of a checkpoint.

    Args:
        weights: What its weights are once it is loaded, in words.
        executor: Runs its forwards.
        outcome: `equal` where plain decoding has the tokens of transformers' `generate`, and draft trees those of plain
            decoding, greedy and sampled.
        reason: Why it is not equal.
    """

    weights: str
    executor: str
    outcome: Outcome
    reason: str = ""


def _by_transformers(config: Callable[[], Any]) -> Callable[[Path], Path]:
    """Let transformers quantise the dense checkpoint, and save what came of it."""

    def make(folder: Path) -> Path:
        with transformers_loading():
            model = AutoModelForCausalLM.from_pretrained(
                folder / "dense", quantization_config=config(), dtype=torch.float32
            )
        model.save_pretrained(folder / "made")
        return folder / "made"

    return make


def _torchao(name: str, **settings: Any) -> Callable[[], Any]:
    def config() -> Any:
        from torchao import quantization

        return transformers.TorchAoConfig(getattr(quantization, name)(**settings))

    return config


def _compressed(preset: str) -> Callable[[Path], Path]:
    """Let compressed-tensors round weights to the nearest step of a scheme, as a quantiser without data does."""

    def make(folder: Path) -> Path:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationStatus,
            apply_quantization_config,
            preset_name_to_scheme,
        )
        from compressed_tensors.quantization.utils import calculate_qparams

        with transformers_loading():
            model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
        scheme = preset_name_to_scheme(preset, ["Linear"])
        groups = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
        apply_quantization_config(model, groups)
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is None:
                continue
            pieces = module.weight.detach().unflatten(1, (module.weight_scale.shape[-1], -1))
            scale, zero = calculate_qparams(pieces.amin(-1), pieces.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
            module.quantization_status = QuantizationStatus.FROZEN
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder / "made")
        compressor.update_config(folder / "made")
        return folder / "made"

    return make


def _hqq(folder: Path) -> Path:
    """Write what HQQ's own layers have, as transformers once saved it."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model = random_model("llama", **_SIZES)
    model.save_pretrained(folder / "made")
    weights = folder / "made" / "model.safetensors"
    tensors, scheme = load_file(weights), BaseQuantizeConfig(nbits=4, group_size=64)
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            del tensors[f"model.{name}.weight"]
            made = HQQLinear(module, scheme, compute_dtype=torch.float32, device="cpu", del_orig=False).state_dict()
            tensors |= {f"model.{name}.{key}": one.clone() for key, one in made.items() if torch.is_tensor(one)}
    save_file(tensors, weights, {"format": "pt"})
    stored = transformers.HqqConfig(nbits=4, group_size=64).to_dict()
    _configure(folder / "made", quantization_config={**stored, "quant_method": "hqq"})
    return folder / "made"


def _mxfp4(folder: Path) -> Path:
    """Write the experts of a small gpt-oss as blocks of 32 numbers of four bits, with a power of two for each."""
    kinds = ["full_attention", "sliding_attention"]
    random_model("gpt_oss", **_SIZES, head_dim=32, layer_types=kinds).save_pretrained(folder / "made")
    weights = folder / "made" / "model.safetensors"
    tensors = load_file(weights)
    bits = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=bits, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(123, 126, shape[:-1], generator=bits, dtype=torch.uint8)
    save_file(tensors, weights, {"format": "pt"})
    _configure(folder / "made", quantization_config={"quant_method": "mxfp4"})
    return folder / "made"


def _fp8(folder: Path) -> Path:
    """Write matrices in fp8 with a scale for each block of 128 by 128 numbers, as DeepSeek's are."""
    random_model("llama", **_SIZES).save_pretrained(folder / "made")
    weights = folder / "made" / "model.safetensors"
    tensors = load_file(weights)
    for name in [name for name in tensors if "proj" in name]:
        rows, columns = (-(-size // 128) for size in tensors[name].shape)
        tensors[f"{name}_scale_inv"] = torch.full((rows, columns), 0.01)
        tensors[name] = (tensors[name] / 0.01).to(torch.float8_e4m3fn)
    save_file(tensors, weights, {"format": "pt"})
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    _configure(folder / "made", quantization_config=scheme)
    return folder / "made"


def _configure(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _gguf(folder: Path) -> Path:
    write_gguf(tiny_llama(), folder / "made.gguf")
    return folder / "made.gguf"


def _bitsandbytes(**settings: Any) -> Callable[[], Any]:
    return lambda: transformers.BitsAndBytesConfig(**settings)


_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
_INT4 = torch.int4  # type: ignore[attr-defined]  # of which torch's types know nothing
_BNB, _CT = ("bitsandbytes", "accelerate"), ("compressed_tensors",)
FORMATS: dict[str, Format] = {
    "GGUF (Q4_1)": Format(_gguf, ("gguf", "accelerate")),
    "compressed-tensors, W4A16": Format(_compressed("W4A16"), _CT),
    "compressed-tensors, W8A16": Format(_compressed("W8A16"), _CT),
    "compressed-tensors, W8A8": Format(_compressed("W8A8"), _CT),
    "compressed-tensors, FP8": Format(_compressed("FP8_DYNAMIC"), _CT),
    "torchao, int8 weights": Format(_by_transformers(_torchao("Int8WeightOnlyConfig")), ("torchao",)),
    "torchao, int4 weights (intx)": Format(
        _by_transformers(_torchao("IntxWeightOnlyConfig", weight_dtype=_INT4)), ("torchao",)
    ),
    "torchao, fp8 weights": Format(_by_transformers(_torchao("Float8WeightOnlyConfig")), ("torchao",)),
    "torchao, int8 weights and activations": Format(
        _by_transformers(_torchao("Int8DynamicActivationInt8WeightConfig")), ("torchao",)
    ),
    "bitsandbytes, 4 bit (nf4)": Format(_by_transformers(_bitsandbytes(**_NF4)), _BNB),
    "bitsandbytes, 8 bit (LLM.int8)": Format(_by_transformers(_bitsandbytes(load_in_8bit=True)), _BNB),
    "HQQ, 4 bit": Format(_hqq, ("hqq",)),
    "fp8 in blocks, as DeepSeek's": Format(_fp8, ("accelerate",)),
    "MXFP4 (gpt-oss)": Format(_mxfp4, ("accelerate",)),
}


def missing_packages(name: str) -> list[str]:
    """Return the packages of a format that are not installed here."""
    return [package for package in FORMATS[name].packages if importlib.util.find_spec(package) is None]


def try_format(name: str, *, dequantize: bool = False) -> Tried:
    """Write a checkpoint, load it, and decode with it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        random_model("llama", **_SIZES).save_pretrained(folder / "dense")
        made = FORMATS[name].make(folder)
        try:
            base = load_base(made, device="cpu", dequantize=dequantize)
        except LoadError as error:
            return Tried("", "", "refused", str(error).replace(str(made), "MODEL"))
        found = base.weights, base.executor_name
        prompts = random_prompts(6)
        reference = base.model if dequantize else _reference(made)
        reference.generation_config.eos_token_id = None
        requests = [
            Request(prompt, SamplingParams(_NEW, temperature=temperature, seed=row, ignore_eos=True))
            for temperature in (0.0, 1.0)
            for row, prompt in enumerate(prompts)
        ]
        plain = plainly(base, requests)
        expected = [generate_reference(reference, prompt, _NEW) for prompt in prompts]
        if tokens_of(plain)[: len(prompts)] != expected:
            return Tried(*found, "differs", f"plain: {tokens_of(plain)[: len(prompts)]} instead of {expected}")
        drafted = run_engine(
            base, OracleDrafter(texts_of(requests, plain)), requests, max_num_seqs=5, num_draft_tokens=8
        )
        if tokens_of(drafted) != tokens_of(plain):
            return Tried(*found, "differs", f"drafted: {tokens_of(drafted)} instead of {tokens_of(plain)}")
    return Tried(*found, "equal")


def _reference(made: Path) -> Any:
    """Load a checkpoint by transformers alone."""
    settings: dict[str, Any] = {"dtype": torch.float32}
    source = made
    if made.suffix == ".gguf":
        source, settings["gguf_file"] = made.parent, made.name
    with transformers_loading():
        model = AutoModelForCausalLM.from_pretrained(source, **settings).eval()
    compute_in_fp32(model)  # of which the page tells
    return model


def row(name: str) -> str:
    """Try a format both ways, and return its line of the table; raise `AssertionError` where tokens differ."""
    cells = []
    for dequantize in (False, True):
        tried = try_format(name, dequantize=dequantize)
        assert tried.outcome != "differs", f"{name}, dequantize={dequantize}: {tried.reason}"
        if tried.outcome == "refused":
            why = _WHY.search(tried.reason)
            cells.append(f"refused: {why[1] if why else tried.reason.rpartition(': ')[2]}")
        else:
            how = tried.weights.partition(", ")[2]
            cells.append(f"{how}, in {'C++' if tried.executor == 'NativeDecoder' else 'transformers’ code'}")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Try all formats, and write the table into the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("page", type=Path)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    packages = ("transformers", "torchao", "bitsandbytes", "compressed-tensors", "hqq", "gguf")
    lines = [
        f"By {', '.join(f'{one} {version(one)}' for one in packages)}:\n",
        "| stored as | loaded | with `loading.dequantize` |",
        "|---|---|---|",
        *map(row, FORMATS),
    ]
    before, _, rest = given.page.read_text(encoding="utf-8").partition(_BEGIN)
    given.page.write_text("\n".join([before + _BEGIN, *lines, _END + rest.partition(_END)[2]]), encoding="utf-8")


if __name__ == "__main__":
    main()
