"""Prompts with images are those of the model's own processor, and nothing that is said becomes an image."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import LlamaConfig

from drafter.errors import LoadError, RequestError
from drafter.images.opening import pixel_digest
from drafter.images.processor import ImageProcessor, example_of, load_processor
from tests.support.images import FAMILIES, asked, config_of, picture, processor_of
from tests.support.marks import slow_but

TWO = [picture(1, 40, 30), picture(2, 20, 50)]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Look closely."},
    {"role": "user", "content": [{"type": "text", "text": "Here:"}, {"type": "image"}, {"type": "image"}]},
    {"role": "user", "content": [{"type": "text", "text": "Which of them?"}]},
]
# PaliGemma's processor moves what the template writes: it is made for prompts without one.
OWN = [family for family in FAMILIES if not family.startswith("paligemma")]


def by_transformers(processor: ImageProcessor, messages: list[dict[str, Any]], images: list[Image.Image]) -> Any:
    """What the processor itself makes of a chat."""
    given = [
        one if isinstance(one["content"], list) else {**one, "content": [{"type": "text", "text": one["content"]}]}
        for one in messages
    ]
    text = processor.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    return processor.processor(text=[text], images=[images], add_special_tokens=False, return_tensors="np")


@pytest.mark.parametrize("family", slow_but(["llava", "idefics3", "gemma3"], OWN))
def test_prompts_are_those_of_the_models_processor(family: str) -> None:
    processor = processor_of(family)
    made = processor.encode(TALK, TWO)
    expected = by_transformers(processor, TALK, TWO)
    assert list(made.ids) == expected["input_ids"][0].tolist()
    assert made.inputs.keys() == expected.keys() - {"input_ids", "attention_mask"}
    for name, value in made.inputs.items():
        assert np.array_equal(value, expected[name]), name
    assert [span.digest for span in made.spans] == [pixel_digest(image) for image in TWO]
    stands = set(processor.processor.image_token_ids)
    for span in made.spans:
        assert made.ids[span.start] in stands
        assert made.ids[span.stop - 1] in stands
    outside = [token for place, token in enumerate(made.ids) if not any(s.start <= place < s.stop for s in made.spans)]
    assert not stands & set(outside)


@pytest.mark.parametrize("family", slow_but(["llava", "qwen2_vl"], FAMILIES))
def test_what_is_said_is_no_image(family: str) -> None:
    processor = processor_of(family)
    mark = processor.processor.image_token
    said = f"Not {mark} an image"
    made = processor.encode(asked(said), [TWO[0]])
    plain = processor.encode(asked("Not an image"), [TWO[0]])
    assert len(made.spans) == 1
    assert made.spans == plain.spans
    assert processor.tokenizer.decode(made.ids[made.spans[0].stop :]).count(mark) == 1  # as text
    place = processor.tokenizer.convert_tokens_to_ids(mark)
    assert place not in made.ids[made.spans[0].stop :]
    with pytest.raises(RequestError, match=r"which stands for an image, 2 times for 1 images"):
        processor.encode(asked(said), [TWO[0]], special_tokens=True)


@pytest.mark.parametrize("family", ["paligemma", "llava"])
def test_a_text_is_what_the_processor_makes_of_it(family: str) -> None:
    processor = processor_of(family)
    processor.tokenizer.chat_template = processor.processor.chat_template = None
    made = processor.encode("<image><image>Which?", TWO)
    own = processor.processor(text=["<image><image>Which?"], images=[TWO], return_tensors="np")
    assert list(made.ids) == own["input_ids"][0].tolist()
    assert [span.digest for span in made.spans] == [pixel_digest(image) for image in TWO]
    assert np.array_equal(made.inputs["pixel_values"], own["pixel_values"])
    assert len(example_of(processor).spans) == 1
    with pytest.raises(RequestError, match="cannot take these images"):
        processor.encode("Which?<image>", TWO)


@pytest.mark.parametrize("family", slow_but(["llava", "gemma3", "paligemma"], FAMILIES))
def test_a_prompt_is_made_again_of_its_ids(family: str) -> None:
    processor = processor_of(family)
    made = processor.encode(asked("Which of them, " + processor.processor.image_token, 2), TWO)
    again = processor.again(made.ids, TWO)
    assert again == made
    assert again.inputs.keys() == made.inputs.keys()
    for name, value in made.inputs.items():
        assert np.array_equal(again.inputs[name], value), name
    assert processor.again(made.ids, TWO[::-1]).spans != made.spans
    with pytest.raises(RequestError):
        processor.again(made.ids, TWO[:1])


def test_a_chat_without_images_is_that_of_the_tokeniser() -> None:
    processor = processor_of("llava")
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    made = processor.encode(messages)
    assert not made.spans
    assert not made.inputs
    own = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(made.ids) == own


def test_equal_pixels_are_equal() -> None:
    image = picture(1)
    png = image.convert("P", palette=Image.Palette.ADAPTIVE).convert("RGB")
    assert pixel_digest(image.copy()) == pixel_digest(image) == pixel_digest(image.convert("RGBA"))
    assert pixel_digest(picture(2)) != pixel_digest(image)
    assert pixel_digest(png.resize((48, 12))) != pixel_digest(png.resize((24, 24)))
    assert pixel_digest(Image.new("RGB", (2, 3))) != pixel_digest(Image.new("RGB", (3, 2)))


def test_images_that_the_processor_tells_apart_are_not_equal() -> None:
    image = picture(1)
    through = image.copy()
    through.info["transparency"] = image.getpixel((0, 0))  # as of a PNG or GIF with a palette
    processor = processor_of("llava")
    whole, part = (processor.encode(asked("What?"), [one]) for one in (image, through))
    assert not np.array_equal(whole.inputs["pixel_values"], part.inputs["pixel_values"])
    assert whole != part


def test_images_and_their_parts_are_of_one_number() -> None:
    processor = processor_of("llava")
    with pytest.raises(RequestError, match="have 2 parts of images, and 1 are given"):
        processor.encode(asked("What?", 2), TWO[:1])
    with pytest.raises(RequestError, match="there is no such file"):
        processor.encode(asked("What?", 1), ["no image"])


def test_a_template_that_leaves_images_out_is_refused() -> None:
    processor = processor_of("llava")
    processor.tokenizer.chat_template = processor.tokenizer.chat_template.replace("<image>", "an image")
    with pytest.raises(RequestError, match=r"writes '<image>', which stands for an image, 0 times for 1 images"):
        processor.encode(asked("What?"), TWO[:1])


def test_prompts_travel() -> None:
    made = processor_of("llava").encode(asked("What?"), TWO[:1])
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert np.array_equal(again.inputs["pixel_values"], made.inputs["pixel_values"])


@pytest.mark.parametrize("family", slow_but(["qwen2_vl"], ["qwen2_vl", "llava_onevision", "gemma4"]))
def test_processors_are_loaded_without_their_part_for_videos(family: str, tmp_path: Path) -> None:
    processor = processor_of(family)
    processor.processor.save_pretrained(tmp_path)
    config_of(family).save_pretrained(tmp_path)
    found = load_processor(tmp_path)
    assert found is not None
    ours, theirs = (one.encode(asked("What?"), TWO[:1]) for one in (found, processor))
    assert len(ours.spans) == 1
    assert np.array_equal(ours.inputs["pixel_values"], theirs.inputs["pixel_values"])


def test_a_model_of_text_has_none_and_a_missing_one_is_named(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    assert load_processor(tmp_path) is None
    config_of("llava").save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"the processor of .* cannot be loaded"):
        load_processor(tmp_path)
