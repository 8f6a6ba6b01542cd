"""Chat templates as they are published put images where the model's processor wants them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.drafter.images.test_processor import by_transformers
from tests.support.images import picture, processor_of

TEMPLATES = {
    "qwen2_vl": (
        "{% set image_count = namespace(value=0) %}{% for message in messages %}{% if loop.first and "
        "message['role'] != 'system' %}<|turn|>system\nYou are a helpful assistant.<|turn|>\n{% endif %}"
        "<|turn|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
        "<|turn|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or "
        "'image' in content or 'image_url' in content %}{% set image_count.value = image_count.value + 1 %}"
        "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% "
        "endif %}{% endfor %}<|turn|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "<|turn|>assistant\n{% endif %}"
    ),
    "smolvlm": (
        "<bos>{% for message in messages %}{{message['role'] | capitalize}}{% if "
        "message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in "
        "message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' "
        "%}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt "
        "%}{{ 'Assistant:' }}{% endif %}"
    ),
    "llava": (
        "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}"
        "{% endif %}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ "
        "'<image>\n' }}{% endfor %}{% if message['role'] != 'assistant' %}{% for content in "
        "message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}"
        "{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{% "
        "generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}{% if "
        "add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "gemma3": (
        "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}"
        "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}{%- set first_user_prefix "
        "= messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}{%- set loop_messages = messages[1:] -%}"
        "{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}{%- "
        "for message in loop_messages -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ "
        "raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif "
        "-%}{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}{%- set role = "
        "message['role'] -%}{%- endif -%}{{ '<|turn|>' + role + '\n' + (first_user_prefix if loop.first else "
        "'') }}{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- elif "
        "message['content'] is iterable -%}{%- for item in message['content'] -%}{%- if item['type'] == "
        "'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- "
        "endif -%}{%- endfor -%}{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}{{ "
        "'<|turn|>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{'<|turn|>model\n'}}{%- endif -%}"
    ),
}
"""Those of Qwen2-VL, SmolVLM, LLaVA 1.5 and Gemma 3, with this tokeniser's tokens around turns."""
IMAGES = [picture(1), picture(2, 40, 20)]


def talk(said: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": said}, {"type": "image"}]},
        {"role": "assistant", "content": "A dog"},
        {"role": "user", "content": "Sure?"},
    ]


@pytest.mark.parametrize("family", TEMPLATES)
def test_published_templates_place_images(family: str) -> None:
    processor = processor_of(family)
    processor.tokenizer.chat_template = processor.processor.chat_template = TEMPLATES[family]
    made = processor.encode(talk("What is it?"), IMAGES)
    assert list(made.ids) == by_transformers(processor, talk("What is it?"), IMAGES)["input_ids"][0].tolist()
    mark = processor.processor.image_token
    said = processor.encode(talk(f"What {mark} is it?"), IMAGES)  # as text
    assert len(made.spans) == len(said.spans) == 2
    assert len(said.ids) == len(made.ids) + len(f" {mark}")
    assert [span.digest for span in said.spans] == [span.digest for span in made.spans]
