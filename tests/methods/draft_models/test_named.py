"""`model:` and `stack:` by name, and models that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from drafter import SpeculativeLM
from drafter.drafters.merged import MergedDrafter
from drafter.drafters.model_drafter import ModelDrafter
from drafter.drafters.registry import load_drafter
from drafter.embedded import EMBEDDED_BASE
from drafter.errors import LoadError
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.draft_models import model_and_device, stack_levels
from drafter.methods.draft_models.drafter import StackedDrafter, difference
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from tests.support.models import tokens_of


@pytest.fixture(scope="module")
def embedded() -> BaseModel:
    return load_base(EMBEDDED_BASE)


def test_levels_of_a_stack_are_names_of_drafters() -> None:
    assert stack_levels("ngram+memory>model:a>model:b") == ["ngram+memory", "model:a", "model:b"]


def test_a_model_may_be_on_another_device(tmp_path: Path) -> None:
    assert model_and_device("org/name") == ("org/name", None)
    assert model_and_device("org/name@cuda:1") == ("org/name", "cuda:1")
    (tmp_path / "at@home").mkdir()
    assert model_and_device(str(tmp_path / "at@home")) == (str(tmp_path / "at@home"), None)


class Tokens:
    """A tokeniser of words."""

    def __init__(self, vocabulary: dict[str, int], *, lower: bool = False) -> None:
        self._vocabulary, self._lower = vocabulary, lower

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary

    def encode(self, text: str, **settings: Any) -> list[int]:
        words = (text.lower() if self._lower else text).split()
        return [self._vocabulary.get(word, 0) for word in words]


def test_tokenisers_are_told_apart_by_vocabulary_and_by_encoding() -> None:
    ours = Tokens({"quick": 1, "The": 2})
    assert difference(Tokens({"quick": 1, "The": 2}), ours) is None
    assert difference(Tokens({"quick": 2, "The": 1}), ours) == (
        "2 of 2 tokens differ, such as 'The' (id 1 there, id 2 in the target model's)"
    )
    assert difference(Tokens({"quick": 1}), ours) == (
        "1 of 2 tokens differ, such as 'The' (missing there, id 2 in the target model's)"
    )
    assert "encodes 'The quick" in str(difference(Tokens({"quick": 1, "The": 2}, lower=True), ours))


def test_names_make_drafters(embedded: BaseModel) -> None:
    model = f"model:{EMBEDDED_BASE}"
    merged = load_drafter(f"{model}@cpu+cacheback", embedded, 6)
    assert isinstance(merged, MergedDrafter)
    assert [type(member) for member in merged.drafters] == [ModelDrafter, CachebackDrafter]
    stack = load_drafter(f"stack:cacheback>{model}", embedded, 6, isolated=True)
    assert isinstance(stack, StackedDrafter)
    assert isinstance(stack.lower, CachebackDrafter)
    assert (stack.spec.max_nodes, stack.lower.spec.max_nodes) == (6, 12)


def test_a_model_with_other_tokens_is_refused(embedded: BaseModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EMBEDDED_BASE, tmp_path / "other"))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(LoadError, match=r"another tokenizer than .*: 2 of .* tokens differ"):
        load_drafter(f"model:{folder}", embedded, 6)


@pytest.mark.parametrize(
    "name",
    ["stack:cacheback", "stack:cacheback>ngram", "stack:>model:x", "stack:ngram>model:x+model:y", "stack:a>model:"],
)
def test_stacks_without_a_model_in_each_upper_level_are_refused(embedded: BaseModel, name: str) -> None:
    with pytest.raises(LoadError, match="use stack:LOWER>model:A"):
        load_drafter(name, embedded, 6)


def test_missing_models_are_named(embedded: BaseModel) -> None:
    with pytest.raises(LoadError, match="/no/such/model"):
        load_drafter("model:/no/such/model", embedded, 6)
    with pytest.raises(LoadError, match="PATH_OR_HUB_ID"):
        load_drafter("model:", embedded, 6)
    with pytest.raises(LoadError, match="nowhere"):
        load_drafter(f"model:{EMBEDDED_BASE}@nowhere", embedded, 6)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model:{}", "stack:cacheback>model:{}", "model:{}+ctc", "stack:ctc>model:{}"])
def test_the_embedded_model_says_the_same(drafter: str) -> None:
    prompts = ["Tom has 3 boxes of 12 pens. How many pens?", "Ann sells 14 eggs at 2 dollars."]
    with SpeculativeLM.from_pretrained(drafter="none") as plain:
        expected = [tokens_of(plain.generate(prompts, temperature=t, seed=1)) for t in (0.0, 1.0)]
    with SpeculativeLM.from_pretrained(drafter=drafter.format(EMBEDDED_BASE)) as lm:
        found = [lm.generate(prompts, temperature=t, seed=1) for t in (0.0, 1.0)]
    assert [tokens_of(some) for some in found] == expected
