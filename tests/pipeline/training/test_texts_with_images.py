"""A head learns from prompts with images, by the model that ships, from the distillation to the drafts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import Tensor

from drafter.embedded import EMBEDDED_DIGITS
from drafter.images.loading import Eyes
from drafter.prompt import Prompt
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel
from drafter.target_model.nodes import LM_HEAD_INPUT
from drafter.training.targets import base_hidden_states
from jobs.distill import main as distill
from recipes.digits.sheets import draw_sheet, glyphs
from tests.pipeline.conftest import job_arguments
from tests.pipeline.training.conftest import Train
from tests.support.images import asked

pytestmark = pytest.mark.slow
QUESTIONS = ("Read the digits.", "Add the digits.")
SETTINGS: dict[str, Any] = {
    "head": json.dumps({"num_frames": 4, "depth": 3}),
    "training__steps": 2,
    "training__evaluate_every": 2,
    "texts__held_out_texts": 2,
}


@pytest.fixture(scope="module")
def distilled(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers to two questions about each of eight sheets, four of them in files, and to four without a sheet."""
    folder = tmp_path_factory.mktemp("sheets")
    rng, some = random.Random(3), glyphs(held_out=True)
    for n in range(8):
        draw_sheet(rng, some, strip=True).image.save(folder / f"{n}.png")
    sheets = [{"path": f"{n}.png", "bytes": None if n < 4 else (folder / f"{n}.png").read_bytes()} for n in range(8)]
    rows = [*product(QUESTIONS, sheets), *((f"Add {n}, 2.", None) for n in range(4))]
    columns = [list(column) for column in zip(*rows, strict=True)]
    pyarrow.parquet.write_table(pa.table(columns, ["prompt", "sheet"]), source := folder / "in.parquet")
    settings: tuple[Any, ...] = ("--reading.images_column", "sheet", "--sampling.max_new_tokens", 10)
    settings += ("--writing.rows_per_file", 5)
    assert distill(job_arguments(source, folder / "out", EMBEDDED_DIGITS, *settings, drafter="none")) == 0
    return folder / "out"


def test_heads_learn_from_what_the_engine_sees(distilled: Path, train: Train, tmp_path: Path) -> None:
    (distilled.parent / "0.png").unlink()
    (distilled.parent / "1.png").write_bytes((distilled.parent / "2.png").read_bytes())
    sharded = SETTINGS | {"sharding__zero_stage": 3}
    refused = train(distilled, tmp_path / "computed", EMBEDDED_DIGITS, **sharded)
    assert refused.code == 2
    assert "set texts.store_hidden, or a lower stage" in refused.error
    trained = train(distilled, base=EMBEDDED_DIGITS, texts__store_hidden=True, **sharded)
    assert trained.code == 0, trained.stderr
    left_out = r"4 rows have images that cannot be read, and are left out: row in\.parquet:10: image '\S+/1\.png': "
    assert re.search(left_out + "it has changed since the target model has seen it", trained.stderr)
    counts = json.loads((trained.folder / "run.json").read_text())["texts"]
    assert (counts["texts"] + counts["held_out"], counts["unusable"]) == (16, 4)
    assert counts["with_images"] >= 10

    staged = trained.folder / "_staged"
    texts = pyarrow.parquet.read_table(staged / "part-000000.parquet").to_pylist()
    stored = pyarrow.parquet.read_table(staged / "part-000000.hidden.parquet")["hidden"].to_pylist()
    sheets = {file.read_bytes(): Image.open(file) for file in sorted(distilled.parent.glob("[2-7].png"))}
    eyes = Eyes()
    base, processor = load_base(EMBEDDED_DIGITS, device="cpu", eyes=eyes), eyes.processor
    assert processor is not None
    for text, content in zip(texts, stored, strict=True):
        tokens, length = text["tokens"], text["prompt_length"]
        states = torch.frombuffer(bytearray(content), dtype=torch.float32).view(len(tokens), -1)
        unseen = base_hidden_states(base, torch.tensor([tokens]))[0]
        if text["images"] is None:
            torch.testing.assert_close(states, unseen, atol=1e-4, rtol=1e-4)
            continue
        (sheet,) = (sheets[one] for one in text["images"])
        (question,) = (one for one in QUESTIONS if one in processor.tokenizer.decode(tokens[:length]))
        prompt = processor.encode(asked(question), [sheet])
        assert list(prompt.ids) == tokens[:length]
        torch.testing.assert_close(states, prefilled(base, prompt, tokens), atol=1e-4, rtol=1e-4)
        assert (states - unseen)[length:].abs().amax() > 0.1


def prefilled(base: BaseModel, prompt: Prompt, tokens: Sequence[int]) -> Tensor:
    """The hidden states of a text after which the engine decodes."""
    assert base.sight is not None
    ids, features, cache = torch.tensor(tokens), base.sight.features(prompt), base.new_cache(1, len(tokens))
    layers, begin = (LM_HEAD_INPUT,), len(prompt.ids)
    parts = [base.prefill(cache, 0, [ids[:begin]], (0,), layers, features=features)]
    for place in range(begin, len(tokens)):  # token by token, as plain decoding
        parts.append(base.prefill(cache, 0, [ids[place : place + 1]], (place,), layers))
    return torch.cat(parts)


def test_a_head_that_reads_several_layers_learns_from_images(distilled: Path, train: Train) -> None:
    """Also where the states are computed again in each step, by two workers, and a teacher reads a layer more."""
    head = json.dumps({"depth": 3, "num_heads": 2, "intermediate_size": 48})
    own = SETTINGS | {"algorithm": "eagle3", "head": head, "texts__held_out_texts": 12}
    trained = train(distilled, base=EMBEDDED_DIGITS, training__teacher=2, workers__number=2, **own)
    assert trained.code == 0, trained.stderr
    assert all(beta >= 1 for beta in trained.betas[2].values())
