"""Checkpoints as quantising packages write them have the tokens of transformers, or are refused: `docs/formats.md`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter.errors import LoadError
from drafter.target_model.architecture import fingerprint
from drafter.target_model.formats import scheme_name, why_inexact
from drafter.target_model.loading import load_base, pick_device
from tests.support.formats import FORMATS, missing_packages, row
from tests.support.models import random_model
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_loaded_as_the_page_says(name: str) -> None:
    if missing := missing_packages(name):
        pytest.skip(f"without {', '.join(missing)}")
    assert row(name) in (ROOT / "docs" / "formats.md").read_text(encoding="utf-8").splitlines()


_W4, _INPUT = {"num_bits": 4}, {"num_bits": 8, "dynamic": True}


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": _W4}}}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": _INPUT}}}, "activations"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"FP8": ["Linear"]}}, "activations"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, None),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8DynamicActivationInt4WeightConfig"}}},
            "activations",
        ),
        ({"quant_method": "bitnet"}, "activations"),
        ({"quant_method": "gptq", "bits": 4}, None),
    ],
    ids=str,
)
def test_schemes_that_are_not_exact_are_known_by_their_settings(scheme: dict[str, object], words: str | None) -> None:
    why = why_inexact(scheme)
    assert (why is None) == (words is None)
    assert words is None or words in str(why)


def test_an_unknown_scheme_that_is_not_exact_is_refused_as_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the proof, which would say of a model that is not quantised that it reads in both directions."""
    pytest.importorskip("torchao")
    random_model("llama", hidden_size=128, intermediate_size=256).save_pretrained(tmp_path / "dense")
    made = FORMATS["torchao, int8 weights and activations"].make(tmp_path)
    monkeypatch.setattr("drafter.target_model.formats.why_inexact", lambda scheme: None)
    with pytest.raises(LoadError, match=r"depend on how a text is read, .*rounded, too \(it is quantised by torchao\)"):
        load_base(made, device="cpu")


def test_what_a_tensor_consists_of_takes_part_in_the_fingerprint() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    seen = set()
    for scale in (1.0, 2.0):
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
        layer.weight *= scale  # the same integers, by other scales
        quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
        seen.add(fingerprint(layer, []))
    assert len(seen) == 2


class _Sealed(torch.Tensor):
    """Tells nothing of its numbers, as some packages' tensors do not."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise NotImplementedError(f"{func} is not implemented")


def test_a_tensor_that_tells_nothing_is_named() -> None:
    class Sealing(torch.nn.Module):
        def state_dict(self, *args: object, **settings: object) -> dict[str, object]:  # type: ignore[override]
            return {"some.weight": torch.ones(3).as_subclass(_Sealed), "other": "no tensor"}

    with pytest.raises(LoadError, match=r"some\.weight is a _Sealed, whose numbers cannot be read"):
        fingerprint(Sealing(), [])


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_devices_are_refused_by_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch has them."""
    with pytest.raises(LoadError, match=f"device '{kind}'"):
        pick_device(kind)

    class There:
        device = torch.device(kind)

    monkeypatch.setattr(torch, "empty", lambda *sizes, device: There())
    with pytest.raises(LoadError, match=f"engines run on CPUs and on GPUs that torch calls cuda, not on {kind}"):
        pick_device(kind)


def test_a_scheme_has_a_name_that_users_know() -> None:
    assert scheme_name({"quant_method": "bitsandbytes", "load_in_4bit": True}) == "bitsandbytes 4 bit"
