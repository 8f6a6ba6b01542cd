"""A head learns from prompts with images, by the model that ships, from the distillation to the drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import Tensor

from drafter import SpeculativeLM
from drafter.embedded import EMBEDDED_DIGITS
from drafter.prompt import Prompt
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.training.targets import base_hidden_states
from jobs.distill import main as distill
from recipes.digits.sheets import draw_sheet, glyphs
from tests.pipeline.conftest import job_arguments, write_jsonl
from tests.pipeline.training.conftest import Train
from tests.support.images import asked

QUESTIONS = ("Read the digits.", "Add the digits.")
HEAD = json.dumps({"num_frames": 4, "depth": 3})


@pytest.fixture(scope="module")
def distilled(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers to two questions about each of eight sheets, and to four without one; two sheets are gone since."""
    folder = tmp_path_factory.mktemp("sheets")
    rng, some = random.Random(3), glyphs(held_out=True)
    for n in range(8):
        draw_sheet(rng, some, strip=True).image.save(folder / f"{n}.png")
    rows: list[dict[str, Any]] = [{"prompt": q, "sheet": f"{n}.png"} for n in range(8) for q in QUESTIONS]
    rows += [{"prompt": f"Add {n}, 2.", "sheet": None} for n in range(4)]
    source = write_jsonl(folder / "in.jsonl", rows)
    settings = ("--reading.images_column", "sheet", "--sampling.max_new_tokens", 10, "--writing.rows_per_file", 5)
    settings += ("--writing.compact_mb", 1)
    assert distill(job_arguments(source, folder / "out", EMBEDDED_DIGITS, *settings, drafter="none")) == 0
    (folder / "6.png").unlink()
    (folder / "7.png").write_bytes((folder / "0.png").read_bytes())
    return folder / "out"


def test_heads_learn_from_what_the_engine_sees(distilled: Path, train: Train) -> None:
    settings = {"head": HEAD, "training__steps": 2, "training__evaluate_every": 2, "texts__held_out_texts": 2}
    trained = train(distilled, base=EMBEDDED_DIGITS, texts__store_hidden=True, **settings)
    assert trained.code == 0, trained.stderr
    assert "4 rows have images that cannot be read, and are left out: row" in trained.stderr
    counts = json.loads((trained.folder / "run.json").read_text())["texts"]
    assert (counts["texts"] + counts["held_out"], counts["unusable"]) == (16, 4)
    assert counts["with_images"] >= 10

    staged = trained.folder / "_staged"
    texts = pyarrow.parquet.read_table(staged / "part-000000.parquet").to_pylist()
    stored = pyarrow.parquet.read_table(staged / "part-000000.hidden.parquet")["hidden"].to_pylist()
    sheets = {file.read_bytes(): Image.open(file) for file in sorted(distilled.parent.glob("[0-5].png"))}
    with SpeculativeLM.from_pretrained(EMBEDDED_DIGITS, "none") as lm:
        for text, content in zip(texts, stored, strict=True):
            tokens, length = text["tokens"], text["prompt_length"]
            states = torch.frombuffer(bytearray(content), dtype=torch.float32).view(len(tokens), -1)
            unseen = base_hidden_states(lm.base, torch.tensor([tokens]))[0].cpu()
            if text["images"] is None:
                torch.testing.assert_close(states, unseen, atol=1e-4, rtol=1e-4)
                continue
            (sheet,) = (sheets[one] for one in text["images"])
            (question,) = (one for one in QUESTIONS if one in lm.tokenizer.decode(tokens[:length]))
            prompt = lm.encode(asked(question), images=[sheet])
            assert isinstance(prompt, Prompt)
            assert list(prompt.ids) == tokens[:length]
            torch.testing.assert_close(states, prefilled(lm.base, prompt, tokens), atol=1e-4, rtol=1e-4)
            assert (states - unseen)[length:].abs().amax() > 0.1


def prefilled(base: BaseModel, prompt: Prompt, tokens: Sequence[int]) -> Tensor:
    """The hidden states of a text after which the engine decodes."""
    assert base.sight is not None
    ids, features, cache = torch.tensor(tokens, device=base.device), base.sight.features(prompt), base.new_cache(1, 200)
    layers, begin = (LM_HEAD_INPUT,), len(prompt.ids)
    parts = [base.prefill(cache, 0, [ids[:begin]], (0,), layers, features=features)]
    for place in range(begin, len(tokens)):  # token by token, as plain decoding
        parts.append(base.prefill(cache, 0, [ids[place : place + 1]], (place,), layers))
    return torch.cat(parts).cpu()
