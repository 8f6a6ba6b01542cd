"""A GGUF file is a whole model: weights, tokeniser and chat template; its tokens are those of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter.errors import LoadError
from drafter.gguf_files import gguf_file
from drafter.llm import SpeculativeLM
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer
from tests.support.gguf_files import rounded, tiny_llama, write_gguf
from tests.support.models import generate_reference

pytest.importorskip("gguf")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    write_gguf(tiny_llama(), file)
    return file


@pytest.mark.parametrize("dequantize", [False, True])
def test_weights_are_those_of_the_file(file: Path, dequantize: bool) -> None:
    base = load_base(file, device="cpu", dequantize=dequantize)
    assert base.weights == f"GGUF, {'dequantised to float32' if dequantize else 'as stored'}"
    weights = base.model.state_dict()
    for name, weight in rounded(tiny_llama()).items():
        assert torch.equal(weights[name].to(torch.bfloat16), weight), name
    assert base.executor_name == "NativeDecoder"
    assert base.eos_token_ids == {2}


def test_text_is_that_of_transformers_with_the_files_own_template(file: Path) -> None:
    with SpeculativeLM.from_pretrained(file, drafter="ngram", device="cpu", num_draft_tokens=7) as lm:
        prompt = lm.encode([{"role": "user", "content": "the 12"}])
        assert lm.tokenizer.decode(prompt) == "<|im_start|>user\nthe 12<|im_end|>\n<|im_start|>assistant\n"
        (found,) = lm.generate([prompt], max_new_tokens=16, ignore_eos=True)
    assert isinstance(prompt, list)
    plain = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    plain.generation_config.eos_token_id = None
    assert found.token_ids == generate_reference(plain, prompt, 16)


def test_digits_are_taken_one_by_one(file: Path) -> None:
    tokenizer = load_tokenizer(file)
    assert [tokenizer.decode([token]) for token in tokenizer("the  12").input_ids] == ["the", "  ", "1", "2"]


def test_a_folder_with_one_file_is_that_file(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "model.gguf")
    (tmp_path / "mmproj-model.gguf").write_bytes(b"what sees")
    assert gguf_file(tmp_path) == tmp_path / "model.gguf"
    assert load_base(tmp_path, device="cpu").fingerprint == load_base(file, device="cpu").fingerprint


def test_a_file_on_the_hub_has_its_repository_in_front(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub_file(name: str, file_name: str) -> Path:
        asked.append((name, file_name))
        return file

    monkeypatch.setattr("drafter.hub.hub_file", hub_file)
    assert gguf_file("owner/name/folder/tiny.gguf") == file
    assert asked == [("owner/name", "folder/tiny.gguf")]


def test_a_file_with_more_than_it_can_hold_is_refused(file: Path, tmp_path: Path) -> None:
    """Before memory is given to it."""
    content, key = file.read_bytes(), b"llama.feed_forward_length"
    place = content.index(key) + len(key) + 4
    huge = tmp_path / "huge.gguf"
    huge.write_bytes(content[:place] + (1 << 28).to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(LoadError, match=r"its weight files have .* bytes"):
        load_base(huge, device="cpu")


def test_an_adapter_beside_it_is_not_applied_without_a_word(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "model.gguf")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/name"}')
    with pytest.raises(LoadError, match="has a PEFT adapter"):
        load_base(tmp_path / "model.gguf", device="cpu")


def test_what_cannot_be_read_is_said(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def refusal(name: Path | str) -> str:
        with pytest.raises(LoadError) as error:
            load_base(name, device="cpu")
        assert "\n" not in str(error.value)
        return str(error.value)

    torn = tmp_path / "torn.gguf"
    torn.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "torn.gguf is damaged, or is of a kind that transformers does not read" in refusal(torn)
    other = shutil.copy(file, tmp_path / "other.gguf")
    assert "several GGUF files (other.gguf, torn.gguf): name one of them" in refusal(tmp_path)
    part = Path(other).rename(tmp_path / "big-00001-of-00003.gguf")
    assert "is one of several parts" in refusal(part)
    assert "there is no such file (on the hub it is OWNER/NAME/FILE.gguf)" in refusal("missing.gguf")
    assert "no such file, and on the hub" in refusal("owner/name/missing.gguf")
