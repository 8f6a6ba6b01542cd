from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from drafter.training.settings import TrainingSettings
from pipeline.io.files import locate
from pipeline.output.columns import PROMPT_IMAGES, columns_type
from pipeline.training.config import TextsConfig, TrainConfig
from pipeline.training.texts import count_answers, key_texts, open_texts, read_part, stage_texts, usual_held_out


def rows(prompts: list[list[int] | None], answers: list[list[int] | None], names: list[str] | None = None) -> pa.Table:
    return pa.table(
        {
            "request_id": names or [f"row:{n}" for n in range(len(prompts))],
            "prompt_token_ids": pa.array(prompts, pa.list_(pa.int64())),
            "token_ids": pa.array(answers, pa.list_(pa.int64())),
        }
    )


def test_rows_without_something_to_learn_are_marked() -> None:
    table = key_texts(rows([[1, 2], [], None, [1, 2], [1, 2, 3]], [[3], [4], [5], [], [9]]), 3, 100, seed=0)
    assert table["tokens"].to_pylist() == [[1, 2, 3], [4], [5], [1, 2], [1, 2, 3]]
    # The last answer lies beyond the longest text.
    assert [key >= 0 for key in table["prompt_key"].to_pylist()] == [True, False, False, False, False]


def spans(*digests: str) -> list[dict[str, Any]]:
    return [{"start": n, "stop": n + 1, "digest": digest} for n, digest in enumerate(digests)]


def test_rows_are_texts_only_with_all_of_their_images() -> None:
    table = rows([[1, 2]] * 6, [[3]] * 6)
    images = [spans("00"), [], None, spans("00"), spans("00", "01"), spans("01")]
    kind = columns_type().field(PROMPT_IMAGES).type
    table = table.append_column(PROMPT_IMAGES, pa.array(images, kind))
    found = {0: [b"zero"], 3: "it is gone", 4: [b"zero"], 5: [b"one"]}
    sheets: Any = SimpleNamespace(files=lambda *_: found)
    keyed = key_texts(table, 10, 100, seed=0, images=sheets)
    assert [key >= 0 for key in keyed["prompt_key"].to_pylist()] == [True, True, True, False, False, True]
    assert keyed["images"].to_pylist() == [[b"zero"], None, None, None, None, [b"one"]]
    assert keyed["image_bytes"].to_pylist() == [4, 0, 0, 0, 0, 3]
    assert keyed["unseen"].to_pylist() == [None] * 3 + ["row row:3: it is gone"] + [None] * 2
    zero, none, same, *_, one = keyed["prompt_key"].to_pylist()  # the same words about another image
    assert none == same
    assert len({zero, none, one}) == 3
    unseen = key_texts(table, 10, 100, seed=0)["prompt_key"].to_pylist()
    assert [key >= 0 for key in unseen] == [False, True, True, False, False, False]


def test_tokens_beyond_the_vocabulary_are_named() -> None:
    table = key_texts(rows([[1], [7]], [[6, 7], [5]]), 10, 7, seed=0)
    assert table["problem"].to_pylist() == [
        "row row:0 has token 7, and the vocabulary ends at 6",
        "row row:1 has token 7, and the vocabulary ends at 6",
    ]


def test_keys_follow_from_seed_and_text() -> None:
    prompts: list[list[int] | None] = [[1, 2], [1, 2], [1, 3]]
    first = key_texts(rows(prompts, [[5], [6], [5]]), 10, 100, seed=0)
    moved = key_texts(rows(prompts[::-1], [[5], [6], [5]], ["row:2", "row:1", "row:0"]), 10, 100, seed=0)
    assert first["key"].to_pylist() == moved["key"].to_pylist()[::-1]
    assert len(set(first["key"].to_pylist())) == 3
    # All answers to a prompt go where the prompt goes.
    greedy, sampled, other = first["prompt_key"].to_pylist()
    assert greedy == sampled != other
    assert key_texts(rows(prompts, [[5], [6], [5]]), 10, 100, seed=1)["prompt_key"][0].as_py() != greedy


@pytest.mark.parametrize(("texts", "held_out"), [(0, 1), (7, 1), (40, 5), (511, 63), (512, 64), (10**6, 64)])
def test_how_many_texts_are_held_out_by_default(texts: int, held_out: int) -> None:
    assert usual_held_out(texts) == held_out


def test_tokens_of_answers_are_counted() -> None:
    """Not those of prompts; and of several chunks."""
    texts = pa.table({"tokens": [[1, 2, 3, 3], [4, 4], [2, 5]], "prompt_length": pa.array([2, 1, 1], pa.int32())})
    assert count_answers(texts, 7).tolist() == [0, 0, 0, 2, 1, 1, 0]
    assert count_answers(pa.concat_tables([texts, texts.slice(1, 1)]), 7).tolist() == [0, 0, 0, 2, 2, 1, 0]


def test_no_prompt_that_is_held_out_is_trained_on(
    local_ray: None, distilled: Path, model: Path, tmp_path: Path
) -> None:
    settings = TrainingSettings(texts_per_step=4)
    config = TrainConfig(str(distilled), "out", texts=TextsConfig(held_out_texts=6), training=settings)
    (tmp_path / "staged").mkdir()
    folder = locate(str(tmp_path / "staged"))
    staged = stage_texts(open_texts([str(distilled)], str(distilled)), folder, config, str(model), 320)
    rows = [row for part in staged.parts for row in read_part(folder, part.name).to_pylist()]
    trained = {tuple(row["tokens"][: row["prompt_length"]]) for row in rows}
    held_out = {tuple(text.tokens[: text.prompt_length]) for text in staged.held_out()}
    assert (len(held_out), staged.counts.texts, len(rows)) == (6, 34, 34)
    assert not held_out & trained
