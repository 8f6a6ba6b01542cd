"""Chats with images in Python, from a model's folder to its answer."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafter import Conversation, SpeculativeLM
from drafter.errors import RequestError
from drafter.prompt import Prompt
from tests.support.images import model_of, picture, processor_of
from tests.support.models import tokens_of

QUESTION = {"type": "text", "text": "What is this?"}
NEW = 8


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeculativeLM]:
    folder = tmp_path_factory.mktemp("llava")
    model_of("llava").save_pretrained(folder)
    processor_of("llava").processor.save_pretrained(folder)
    with SpeculativeLM.from_pretrained(folder, "ngram", max_num_seqs=4, num_draft_tokens=4) as loaded:
        yield loaded


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_images_come_in_many_forms(lm: SpeculativeLM, tmp_path: Path) -> None:
    image, content = picture(1), BytesIO()
    image.save(content, "PNG")
    (tmp_path / "image.png").write_bytes(content.getvalue())
    uri = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    forms: list[Any] = [image, str(tmp_path / "image.png"), uri, content.getvalue(), np.asarray(image)]
    asked = [user({"type": "image", "image": form}, QUESTION) for form in forms]
    asked.append(user({"type": "image_url", "image_url": {"url": uri}}, QUESTION))
    answers = lm.chat(asked, max_new_tokens=NEW, ignore_eos=True)
    assert [one.error for one in answers] == [None] * 6
    prompt = processor_of("llava").encode(user({"type": "image"}, QUESTION), [image])
    own = lm.base.model.generate(
        input_ids=torch.tensor([list(prompt.ids)]),
        pixel_values=torch.from_numpy(prompt.inputs["pixel_values"]),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
    )[0, len(prompt.ids) :].tolist()
    assert tokens_of(answers) == [own] * 6
    whole = lm.encode(Conversation(user({"type": "image"}, QUESTION)), images=[image])
    assert whole == lm.encode(user(QUESTION), images=[image]) == prompt  # in the user's first message
    with pytest.raises(RequestError, match="has its own images"):
        lm.encode(whole, images=[image])
    assert isinstance(whole, Prompt)
    (again,) = lm.generate(whole, max_new_tokens=NEW, ignore_eos=True)
    assert again.token_ids == own
    assert list(lm.stream(asked[0], max_new_tokens=NEW, ignore_eos=True))[-1].token_ids


def test_a_broken_image_costs_its_prompt_alone(lm: SpeculativeLM) -> None:
    asked = [user({"type": "image", "image": b"no image"}, QUESTION), user(QUESTION), user({"type": "image"}, QUESTION)]
    broken, text, missing = lm.chat(asked, max_new_tokens=NEW)
    assert text.error is None
    assert broken.error is not None
    assert broken.error.startswith("image")
    assert missing.error is not None
    assert "none is given" in missing.error


def test_a_model_of_text_names_what_it_lacks() -> None:
    with SpeculativeLM.from_pretrained(drafter="none", max_num_seqs=1) as lm:
        (refused,) = lm.chat([user({"type": "image", "image": picture(1)}, QUESTION)], max_new_tokens=1)
        assert refused.error is not None
        assert "the prompt has images, and " in refused.error
        assert "reads text alone" in refused.error
