from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drafter.ctc.config import CTCHeadConfig
from drafter.ctc.head import CTCHead
from drafter.errors import LoadError
from drafter.heads.checkpoint import load_head, save_head
from drafter.heads.contract import Provenance
from drafter.heads.packed import pack, unpack
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.heads import make_head
from tests.support.models import plainly, random_model, run_engine
from tests.support.properties import examples


@pytest.fixture
def saved(tiny_base: BaseModel, tmp_path: Path) -> Path:
    """A head's folder."""
    torch.manual_seed(1)
    head = CTCHead(CTCHeadConfig(32, 97, num_frames=5, depth=4, num_heads=2, intermediate_size=40, num_layers=2))
    head.provenance = Provenance("org/base", tiny_base.fingerprint, {"steps": 7, "beta": {"16": 2.5}})
    save_head(head, tmp_path / "head")
    return tmp_path / "head"


def test_round_trip(tiny_base: BaseModel, saved: Path) -> None:
    head = load_head(saved, tiny_base)
    assert isinstance(head, CTCHead)
    assert head.config == CTCHeadConfig(32, 97, num_frames=5, depth=4, num_heads=2, intermediate_size=40, num_layers=2)
    assert head.provenance == Provenance("org/base", tiny_base.fingerprint, {"steps": 7, "beta": {"16": 2.5}})
    assert not head.training
    assert not any(parameter.requires_grad for parameter in head.parameters())
    tensors = load_file(saved / "model.safetensors")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in head.state_dict().items())
    # Of the base nothing is stored.
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in head.parameters())
    save_head(head, saved)
    assert json.loads((saved / "config.json").read_text())["training"]["steps"] == 7


def test_a_packed_head_takes_half_of_bf16_and_proposes_nearly_the_same(tiny_base: BaseModel, saved: Path) -> None:
    head = load_head(saved, tiny_base)
    save_head(head, saved, packed=True)
    again = load_head(saved, tiny_base)
    for name, tensor in head.state_dict().items():
        step = tensor.abs().amax(-1, keepdim=True) / 254  # half of one
        assert bool(((again.state_dict()[name] - tensor).abs() <= step * 1.001).all())
    stored = {
        name: one.numel() for name, one in load_file(saved / "model.safetensors").items() if one.dtype == torch.int8
    }
    assert sum(stored.values()) > 0.9 * sum(tensor.numel() for tensor in head.parameters())


def test_rounding_twice_changes_nothing() -> None:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(20, 7), "none": torch.zeros(16, 3), "few": torch.randn(3, 5), "ids": torch.arange(4)}
    tensors["a"][0, 0] = torch.inf
    once = unpack(pack(tensors))
    assert not torch.isfinite(once["a"][0]).any()
    assert once["none"].eq(0).all()
    assert torch.equal(once["few"], tensors["few"])
    assert torch.equal(once["ids"], tensors["ids"])
    again = unpack(pack(once))
    assert torch.allclose(again["a"][1:], once["a"][1:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [None, torch.ones(3), torch.ones(20, dtype=torch.int64), torch.ones(20, 1)])
def test_integers_without_scales_are_refused(tiny_base: BaseModel, saved: Path, scale: torch.Tensor | None) -> None:
    packed = pack(load_file(saved / "model.safetensors"))
    name = next(name for name, tensor in packed.items() if tensor.dtype == torch.int8)
    del packed[name + ".scale"]
    save_file(packed if scale is None else packed | {name + ".scale": scale}, saved / "model.safetensors")
    with pytest.raises(LoadError, match=rf"damaged weights: tensor '{name}' is of integers"):
        load_head(saved, tiny_base)


def test_a_head_is_not_saved_without_its_base(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="provenance"):
        save_head(CTCHead(CTCHeadConfig(32, 97, num_heads=2)), tmp_path)


def test_a_head_of_another_base_is_refused(saved: Path) -> None:
    other = BaseModel(random_model("llama", seed=5), "other-base")
    with pytest.raises(LoadError, match=r"org/base.*not to 'other-base'") as error:
        load_head(saved, other)
    config = json.loads((saved / "config.json").read_text())
    assert config["base_model"]["fingerprint"] in str(error.value)
    assert other.fingerprint in str(error.value)


def change(key: str, value: Any) -> Callable[[Path], None]:
    """Set `key` (dots go down) of config.json; None deletes it."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        *path, last = key.split(".")
        inner = config
        for part in path:
            inner = inner[part]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def change_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"no config\.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"no model\.safetensors"),
    "a pickle": (only_a_pickle, r"pytorch_model\.bin: pickles are never loaded"),
    "not json": (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read"),
    "not utf-8": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), r"config\.json cannot be read"),
    "another json": (lambda f: (f / "config.json").write_text("[1]"), r"not a draft head's"),
    "a model's config": (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), r"not a draft head's"),
    "later format": (change("format_version", 2), r"format version 2"),
    "unknown algorithm": (change("algorithm", "telepathy"), r"'telepathy'; known here: .*ctc"),
    "no fingerprint": (change("base_model.fingerprint", None), r"does not name its target model"),
    "unknown key": (change("head.mood", "good"), r"unknown configuration key 'mood'"),
    "missing key": (change("head.vocab_size", None), r"key 'vocab_size' is missing"),
    "wrong type": (change("head.num_frames", "eight"), r"'num_frames' cannot be 'eight': it must be a valid integer"),
    "boolean size": (change("head.num_frames", True), r"'num_frames' cannot be True: it must be a valid integer"),
    "fractional size": (change("head.num_frames", 8.0), r"'num_frames' cannot be 8\.0: it must be a valid integer"),
    "unknown loss": (change("head.loss", "hinge"), r"'loss' cannot be 'hinge': it must be 'prefix', 'ctc' or 'ce'"),
    "sizes that do not fit": (change("head.num_heads", 5), r"even width"),
    "endless layers": (change("head.num_layers", 10**7), r"more layers than its weight files have tensors for"),
    # Built as it says, each of these would take more memory than there is.
    "endless width": (change("head.intermediate_size", 10**12), r"has shape \[.*, its configuration says \[.*0000"),
    "endless frames": (
        change("head.num_frames", 10**12),
        r"has shape \[5, 32\], its configuration says \[10{12}, 32\]",
    ),
    "no computer's width": (change("head.intermediate_size", 2**62), r"no head can be built"),
    "no number": (change("head.rope_theta", float("nan")), r"its configuration cannot be read: Out of range float"),
    "no rotation": (change("head.rope_theta", 0.0), r"rope_theta must be at least 1, not 0\.0"),
    "larger vocabulary": (change("head.vocab_size", 98), r"its vocab_size is 98, and that of the target model 97"),
    "other width": (change("head.hidden_size", 64), r"its hidden_size is 64, and that of the target model 32"),
    "nested too deep": (lambda f: (f / "config.json").write_text("[" * 9000), r"config\.json cannot be read"),
    "numbers of 8 bits": (
        change_tensors(lambda t: t.update({"module.slots": t["module.slots"].to(torch.float8_e4m3fn)})),
        r"'module.slots' is of type torch\.float8_e4m3fn; it can be float32",
    ),
    "whole numbers": (
        change_tensors(lambda t: t.update({"module.slots": t["module.slots"].long()})),
        r"'module.slots' is of type torch\.int64; it can be float32",
    ),
    "truncated weights": (lambda f: (f / "model.safetensors").write_bytes(b"abc"), r"damaged weights"),
    "missing tensor": (change_tensors(lambda t: t.pop("module.slots")), r"'module.slots' is missing"),
    "unknown tensor": (change_tensors(lambda t: t.update(extra=torch.ones(1))), r"unknown tensor 'extra'"),
    "misshapen tensor": (
        change_tensors(lambda t: t.update({"module.slots": torch.ones(2, 2)})),
        r"'module.slots' has shape \[2, 2\]",
    ),
    "not a number": (
        change_tensors(lambda t: t["module.slots"].fill_(float("nan"))),
        r"'module.slots' holds values that are not",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_folders_are_refused_in_one_line(tiny_base: BaseModel, saved: Path, kind: str) -> None:
    damage, words = DAMAGE[kind]
    damage(saved)
    with pytest.raises(LoadError, match=words) as error:
        load_head(saved, tiny_base)
    assert "\n" not in str(error.value)
    assert str(saved) in str(error.value)


@pytest.fixture(scope="module")
def heads(tiny_base: BaseModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of a head of each algorithm."""
    found = {}
    for kind in ("context 2, in part", "medusa", "hydra++", "eagle3, in part", "specformer"):
        head = make_head(tiny_base, kind)
        found[kind] = tmp_path_factory.mktemp("head")
        head.provenance = Provenance("org/base", tiny_base.fingerprint)
        save_head(head, found[kind])
    return found


VALUES = st.one_of(
    st.integers(-3, 12),
    st.integers().map(lambda one: one**9),
    st.sampled_from([2**31, 2**40, 2**62, 2**63, 2**64, 10**6, 10**300]),
    st.floats(),
    st.booleans() | st.none() | st.text(max_size=3),
    st.lists(st.integers(-2, 2**62), max_size=4),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "type"]), st.sampled_from(["linear", "llama3", 0, None])),
)


@examples(40)
@given(st.data())
def test_whatever_a_configuration_says_its_head_is_refused_in_a_line_or_drafts(
    tiny_base: BaseModel, heads: dict[str, Path], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(heads)))
    config = json.loads((heads[kind] / "config.json").read_text())
    keys = st.sampled_from([*((key,) for key in config), *(("head", key) for key in config["head"])])
    for *path, last in data.draw(st.lists(keys, min_size=1, max_size=2)):
        inner = config[path[0]] if path else config
        if isinstance(inner, dict):
            inner[last] = data.draw(VALUES)
    with TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").hardlink_to(heads[kind] / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(config))
        head, refused = None, ""
        try:
            head = load_head(folder, tiny_base)
        except LoadError as error:
            refused = str(error)
    assert "\n" not in refused
    if head is not None:
        requests = [Request([5, 6, 7], SamplingParams(3))]
        drafted = run_engine(tiny_base, head.drafter(tiny_base, 6), requests, max_num_seqs=1, max_model_len=24)
        assert drafted[0].token_ids == plainly(tiny_base, requests)[0].token_ids


@pytest.mark.parametrize(
    ("kind", "field", "value", "words"),
    [
        ("eagle3, in part", "depth", 2**31, "depth must be at most 256, not 2147483648"),
        ("context 2, in part", "blank_bias", 10**300, "no head can be built .* overflow"),
    ],
)
def test_sizes_that_no_tensor_proves_are_bounded(
    tiny_base: BaseModel, heads: dict[str, Path], kind: str, field: str, value: int, words: str
) -> None:
    config = json.loads((heads[kind] / "config.json").read_text())
    config["head"][field] = value
    with TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").hardlink_to(heads[kind] / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with pytest.raises(LoadError, match=words):
            load_head(folder, tiny_base)


def test_a_head_reads_only_layers_that_its_base_has(tiny_base: BaseModel, heads: dict[str, Path]) -> None:
    for layers, words in (([0, 1, 3], "layer 3 of its target model, .* has 3 layers"), ([0, 1, -2], "none below -1")):
        config = json.loads((heads["specformer"] / "config.json").read_text())
        config["head"]["hidden_layers"] = layers
        (heads["specformer"] / "config.json").write_text(json.dumps(config))
        with pytest.raises(LoadError, match=words):
            load_head(heads["specformer"], tiny_base)


def test_a_pickle_beside_the_weights_is_not_opened(tiny_base: BaseModel, saved: Path) -> None:
    (saved / "pytorch_model.bin").write_bytes(b"not a pickle at all")
    assert isinstance(load_head(saved, tiny_base), CTCHead)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("nowhere", "no such folder"),
        ("org/never-uploaded", r"as a hub id: it is not in the cache .*, and HF_HUB_OFFLINE is set"),
        ("org/bad name!", "as a hub id"),
    ],
)
def test_a_head_that_is_nowhere(
    tiny_base: BaseModel, name: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=words):
        load_head(name, tiny_base)


def test_a_file_is_not_a_head(tiny_base: BaseModel, saved: Path) -> None:
    with pytest.raises(LoadError, match="is a file"):
        load_head(saved / "config.json", tiny_base)


def test_a_hub_id_is_loaded_through_the_hub_library(
    tiny_base: BaseModel, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, file: str, *, local_files_only: bool) -> str:
        asked.append((name, file))
        return str(saved / file)

    monkeypatch.setattr("drafter.hub.hf_hub_download", download)
    assert isinstance(load_head("org/head", tiny_base), CTCHead)
    assert asked == [("org/head", "config.json"), ("org/head", "model.safetensors")]
