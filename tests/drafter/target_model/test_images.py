"""A prompt with images is read as the model itself reads it, and continued token for token as `generate` does."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from drafter.drafters.contract import PlainDecoding
from drafter.prompt import Prompt
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.images import FAMILIES, asked, base_of, picture, processor_of
from tests.support.marks import slow_but
from tests.support.models import DEVICE, AdversarialDrafter, OracleDrafter, run_engine

NEW = 12
QUICK = ["llava", "qwen3_vl", "gemma3", "paligemma"]


@lru_cache(maxsize=1)
def base(family: str) -> BaseModel:
    return base_of(family)


@lru_cache(maxsize=1)
def prompts(family: str) -> list[Prompt]:
    """Rows with 0 to 3 images of different sizes; the same words with other images; and the same images."""
    encode = processor_of(family).encode
    one, two, three = picture(1, 24, 24), picture(2, 40, 30), picture(3, 20, 50)
    return [
        encode(asked("What is this?"), [one]),
        encode(asked("What is this?"), [two]),
        encode(asked("No image here: count to 5.", 0)),
        encode(asked("Which is larger?", 2), [one, three]),
        encode(asked("All of these, then!", 3), [three, two, one]),
        encode(asked("What is that?"), [two]),
        encode(asked("And another text.", 0)),
    ]


def reference(model: Any, prompt: Prompt) -> list[int]:
    inputs = {name: torch.from_numpy(value).to(DEVICE) for name, value in prompt.inputs.items()}
    ids = torch.tensor([list(prompt.ids)], device=DEVICE)
    made = model.generate(input_ids=ids, **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return made[0, len(prompt.ids) :].tolist()  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def expected(family: str) -> list[list[int]]:
    return [reference(base(family).model, prompt) for prompt in prompts(family)]


def requests(family: str, **sampling: Any) -> list[Request]:
    settings = SamplingParams(NEW, ignore_eos=True, **sampling)
    return [Request(prompt, settings) for prompt in prompts(family)]


@pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))
def test_rows_with_images_are_continued_as_generate_does(family: str) -> None:
    assert base(family).sight is not None, base(family).blind
    texts = [[*prompt.ids, *text] for prompt, text in zip(prompts(family), expected(family), strict=True)]
    assert expected(family)[0] != expected(family)[1]  # or the images do not matter
    for drafter in (PlainDecoding(), OracleDrafter(texts), AdversarialDrafter(0)):
        found = run_engine(base(family), drafter, requests(family), max_num_seqs=4, num_draft_tokens=7)
        assert [one.token_ids for one in found] == expected(family), type(drafter)
