"""The frozen table: what it finds, how it is kept on disk, and which files are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drafter.drafters.contract import PlainDecoding
from drafter.drafters.registry import load_drafter
from drafter.embedded import EMBEDDED_BASE
from drafter.errors import LoadError
from drafter.methods.cacheback.drafter import CachebackDrafter
from drafter.methods.cacheback.frozen_table import FrozenTable, load_table, read_metadata, table_bytes
from drafter.requests import Request, SamplingParams
from drafter.target_model.loading import load_base
from drafter.text.tokenizers import load_tokenizer, vocabulary_digest
from recipes.cacheback.counting import NgramCounts
from tests.support.models import run_engine

VOCABULARY = "0123456789abcdef"


def table(leaders: list[int], offsets: list[int], continuations: list[list[int]]) -> FrozenTable:
    return FrozenTable(
        np.array(leaders, np.int32), np.array(offsets, np.int64), np.array(continuations, np.int32).reshape(-1, 2)
    )


TABLE = table([3, 7], [0, 2, 3], [[4, 5], [6, 7], [3, 9]])


def saved(folder: Path, one: FrozenTable, vocabulary: str = VOCABULARY) -> Path:
    file = folder / "table.safetensors"
    file.write_bytes(table_bytes(one, vocabulary, {"texts": 3}))
    return file


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    found = load_table(saved(tmp_path, TABLE), VOCABULARY, 100)
    assert [list(found.followers((leader,))) for leader in (2, 3, 7, 8)] == [[], [(4, 5), (6, 7)], [(3, 9)], []]
    assert read_metadata(tmp_path / "table.safetensors")["provenance"] == '{"texts": 3}'


def test_the_beginning_of_a_text_has_no_followers() -> None:
    counts = NgramCounts(10)
    counts.add([1, 2, 3, 4])
    assert list(counts.table(leaders=5, followers=2).followers(())) == []


def test_a_table_without_leaders_finds_nothing(tmp_path: Path) -> None:
    assert list(load_table(saved(tmp_path, table([], [0], [])), VOCABULARY, 100).followers((1,))) == []


def test_a_table_of_another_tokeniser_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, TABLE)
    with pytest.raises(LoadError, match=r"is of another tokeniser: make one with python -m recipes\.cacheback"):
        load_table(file, "fedcba9876543210", 100)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (table([3, 7], [0, 2, 4], [[4, 5], [6, 7], [3, 9]]), "offsets do not fit"),
        (table([3, 7], [0, 4, 3], [[4, 5], [6, 7], [3, 9]]), "offsets do not fit"),
        (table([7, 3], [0, 2, 3], [[4, 5], [6, 7], [3, 9]]), "leaders do not rise"),
        (table([3, 7], [0, 2, 3], [[4, 5], [6, 100], [3, 9]]), "token ids outside of 0 to 99"),
        (table([-1, 7], [0, 2, 3], [[4, 5], [6, 7], [3, 9]]), "token ids outside of 0 to 99"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, bad: FrozenTable, why: str) -> None:
    with pytest.raises(LoadError, match=f"is damaged: .*{why}"):
        load_table(saved(tmp_path, bad), VOCABULARY, 100)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table"
    with pytest.raises(LoadError, match=r"is no table of recipes\.cacheback: No such file"):
        load_table(file, VOCABULARY, 100)
    file.write_text("{}")
    with pytest.raises(LoadError, match=r"is no table of recipes\.cacheback"):
        load_table(file, VOCABULARY, 100)
    with pytest.raises(LoadError, match=r"is no table of recipes\.cacheback, whose format is"):
        load_table(EMBEDDED_BASE / "model.safetensors", VOCABULARY, 100)


def test_the_drafter_by_name_drafts_from_the_table_and_changes_no_token(tmp_path: Path) -> None:
    base, tokenizer = load_base(EMBEDDED_BASE, device="cpu"), load_tokenizer(EMBEDDED_BASE)
    prompt = tokenizer("Tom has 3 boxes of 12 pens.")["input_ids"]
    asked = [Request(prompt, SamplingParams(24, ignore_eos=True))]
    (plain,) = run_engine(base, PlainDecoding(), asked)
    text = [*prompt[-1:], *plain.token_ids]
    followers = {leader: text[place + 1 : place + 3] for place, leader in enumerate(text[:-2])}
    leaders = sorted(followers)
    knows = table(leaders, list(range(len(leaders) + 1)), [followers[leader] for leader in leaders])
    file = saved(tmp_path, knows, vocabulary_digest(tokenizer))
    for isolated in (False, True):
        drafter = load_drafter(f"cacheback:{file}+ngram", base, 8, isolated=isolated)
        (found,) = run_engine(base, drafter, asked, num_draft_tokens=8)
        assert found.token_ids == plain.token_ids
        (without,) = run_engine(base, CachebackDrafter(8, isolated=isolated), asked, num_draft_tokens=8)
        assert found.counts.num_decode_steps < without.counts.num_decode_steps
    with pytest.raises(LoadError, match="is of another tokeniser"):
        load_drafter(f"cacheback:{saved(tmp_path, knows)}", base, 8)
