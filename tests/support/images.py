"""Small random models that see, each with its family's own processor, a tokeniser of characters, and images."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast

from drafter.images.processor import ImageProcessor, without_videos
from drafter.prompt import Prompt
from drafter.target_model.architecture import transformers_loading
from drafter.target_model.model import BaseModel
from tests.support.models import DEVICE, EOS

_TOKENS: dict[str, str] = {
    "image_token": "<image>",
    "video_token": "<video>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "row_1_col_1": "<row_1_col_1>",
    "row_1_col_2": "<row_1_col_2>",
    "image_break": "[IMG_BREAK]",
    "image_end": "[IMG_END]",
    "image_pixtral": "[IMG]",
    "soft": "<image_soft_token>",
    "pad_qwen": "<|image_pad|>",
    "video_qwen": "<|video_pad|>",
    "start_qwen": "<|vision_start|>",
    "end_qwen": "<|vision_end|>",
    "turn": "<|turn|>",
}
_SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", *_TOKENS.values()]
CHARACTERS = string.ascii_letters + string.digits + " .,?!:;<>|_-[]()/'\n"
VOCABULARY = len(_SPECIAL) + len(CHARACTERS)
"""Tokens of all these models: no id is another's."""
ID = {token: number for number, token in enumerate(_SPECIAL)}


def tokenizer(marks: dict[str, str], image: str) -> Any:
    """A tokeniser with a token for each character, and a chat template that writes `image` for each image.

    Args:
        marks: Names by which the family's processor finds its tokens.
    """
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *CHARACTERS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(_SPECIAL)
    template = (
        "<bos>{% for message in messages %}<|turn|>{{ message['role'] }}:"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + image + "{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=template,
        extra_special_tokens=marks,
    )


_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_EYES: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
_TOKEN_IDS = {
    "image_token_id": ID["<|image_pad|>"],
    "video_token_id": ID["<|video_pad|>"],
    "vision_start_token_id": ID["<|vision_start|>"],
    "vision_end_token_id": ID["<|vision_end|>"],
}


def _text(kind: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": kind, **_TEXT, **settings}


def _deep(**settings: Any) -> dict[str, Any]:
    eyes = {**_EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16}
    return {**eyes, **settings}


CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": _text("llama"),
        "vision_config": _SIGLIP,
        "image_token_id": ID["<image>"],
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    },
    "llava_onevision": {
        "text_config": _text("qwen2"),
        "vision_config": _SIGLIP,
        "image_token_index": ID["<image>"],
        "video_token_index": ID["<video>"],
        "image_grid_pinpoints": [[24, 24], [24, 48], [48, 24]],
    },
    "idefics3": {
        "text_config": _text("llama"),
        "vision_config": {**_TOWER, "image_size": 32, "patch_size": 8},
        "image_token_id": ID["<image>"],
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "smolvlm": {
        "text_config": _text("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=16),  # for the C++ library
        "vision_config": {**_TOWER, "image_size": 32, "patch_size": 8},
        "image_token_id": ID["<image>"],
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "qwen2_vl": {
        "text_config": _text("qwen2_vl_text", rope_parameters=_ROPE),
        "vision_config": {**_EYES, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        **_TOKEN_IDS,
    },
    "qwen2_5_vl": {
        "text_config": _text("qwen2_5_vl_text", rope_parameters=_ROPE),
        "vision_config": {
            **_EYES,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        **_TOKEN_IDS,
    },
    "qwen3_vl": {
        "text_config": _text("qwen3_vl_text", rope_parameters={**_ROPE, "mrope_interleaved": True}),
        "vision_config": _deep(deepstack_visual_indexes=[0, 1]),
        **_TOKEN_IDS,
    },
    "qwen3_5": {
        "text_config": _text(
            "qwen3_5_text",
            rope_parameters={**_ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        ),
        "vision_config": _deep(),
        **_TOKEN_IDS,
    },
    "internvl": {
        "text_config": _text("qwen2"),
        "vision_config": {**_TOWER, "image_size": [32, 32], "patch_size": [8, 8]},
        "image_token_id": ID["<IMG_CONTEXT>"],
        "image_seq_length": 4,
    },
    "gemma3": {
        "text_config": _text(
            "gemma3_text",
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        "vision_config": {**_SIGLIP, "image_size": 32},
        "mm_tokens_per_image": 4,
        "boi_token_index": ID["<start_of_image>"],
        "eoi_token_index": ID["<end_of_image>"],
        "image_token_index": ID["<image_soft_token>"],
    },
    "paligemma": {
        "text_config": _text("gemma"),
        "vision_config": {**_SIGLIP, "projection_dim": 32, "vision_use_head": False},
        "image_token_index": ID["<image>"],
        "projection_dim": 32,
        "hidden_size": 32,
        "vocab_size": VOCABULARY,
    },
    "paligemma-2": {
        "text_config": _text(
            "gemma2",
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        "vision_config": {**_SIGLIP, "projection_dim": 32, "vision_use_head": False},
        "image_token_index": ID["<image>"],
        "projection_dim": 32,
        "hidden_size": 32,
        "vocab_size": VOCABULARY,
    },
    "gemma4": {
        "text_config": _text(
            "gemma4_text",
            global_head_dim=8,
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            use_bidirectional_attention="vision",
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
        ),
        "vision_config": {
            **{name: size for name, size in _TOWER.items() if name != "image_size"},
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        "audio_config": None,
        "boi_token_id": ID["<start_of_image>"],
        "eoi_token_id": ID["<end_of_image>"],
        "image_token_id": ID["<image_soft_token>"],
        "video_token_id": ID["<video>"],
        "audio_token_id": ID["<IMG_CONTEXT>"],
    },
    "mistral3": {
        "text_config": _text("mistral", sliding_window=None),
        "vision_config": {"model_type": "pixtral", **_TOWER, "image_size": 64},
        "image_token_index": ID["[IMG]"],
        "spatial_merge_size": 2,
    },
    "llava-pixtral": {
        "text_config": _text("mistral", sliding_window=None),
        "vision_config": {"model_type": "pixtral", **_TOWER, "image_size": 64},
        "image_token_id": ID["[IMG]"],
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    },
}
"""Settings of each family's configuration."""
FAMILIES = tuple(CONFIGS)


def _siglip(size: int = 24, **more: Any) -> Any:
    images = transformers.SiglipImageProcessorPil(size={"height": size, "width": size})
    for name, value in more.items():
        setattr(images, name, value)
    return images


def _tiles(kind: str) -> Any:
    return getattr(transformers, kind)(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})


def _qwen(size: dict[str, int]) -> Any:
    return transformers.Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=size)


class PixtralTiles(transformers.ProcessorMixin):
    """As `PixtralProcessor`, which is not there without torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str, merge: int = 1) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.image_token_id, self._side = "[IMG]", ID["[IMG]"], 8 * merge

    def _process_images(self, images: Any, **settings: Any) -> Any:
        side = {"height": self._side, "width": self._side}
        return super()._process_images(images, **{**settings, "patch_size": side})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **settings: Any) -> str:
        height, width = (int(size) // self._side for size in image_inputs["image_sizes"][image_idx])
        return "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"


_IMAGE, _PAD = {"image_token": "<image>"}, {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_BOI = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_SOUNDS = {"boa_token": "<img>", "eoa_token": "</img>", "audio_token": "<IMG_CONTEXT>"}  # of which there are none
_INTERN = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_PIXELS = {"shortest_edge": 16 * 16, "longest_edge": 48 * 48}
_EYED = "<|vision_start|><|image_pad|><|vision_end|>"
PARTS: dict[str, tuple[Any, Callable[[], Any], dict[str, str], str, dict[str, Any]]] = {
    "llava": (
        "LlavaProcessor",
        _siglip,
        _IMAGE,
        "<image>",
        {"patch_size": 8, "vision_feature_select_strategy": "full"},
    ),
    "llava_onevision": (
        "LlavaOnevisionProcessor",
        lambda: transformers.LlavaOnevisionImageProcessorPil(
            size={"height": 24, "width": 24}, image_grid_pinpoints=CONFIGS["llava_onevision"]["image_grid_pinpoints"]
        ),
        _IMAGE,
        "<image>",
        {"num_image_tokens": 9, "vision_feature_select_strategy": "full"},
    ),
    "idefics3": (
        "Idefics3Processor",
        partial(_tiles, "Idefics3ImageProcessorPil"),
        {},
        "<image>",
        {"image_seq_len": 4},
    ),
    "smolvlm": (
        "SmolVLMProcessor",
        partial(_tiles, "SmolVLMImageProcessorPil"),
        _IMAGE | {"fake_image_token": "<fake_token_around_image>"},
        "<image>",
        {"image_seq_len": 4},
    ),
    "qwen2_vl": ("Qwen2VLProcessor", partial(_qwen, _PIXELS), _PAD, _EYED, {}),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", partial(_qwen, _PIXELS), _PAD, _EYED, {}),
    "qwen3_vl": ("Qwen3VLProcessor", partial(_qwen, _PIXELS), _PAD, _EYED, {}),
    "qwen3_5": ("Qwen3VLProcessor", partial(_qwen, _PIXELS), _PAD, _EYED, {}),
    "internvl": (
        "InternVLProcessor",
        lambda: transformers.GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=3),
        _INTERN,
        "<IMG_CONTEXT>",
        {"image_seq_length": 4},
    ),
    "gemma3": (
        "Gemma3Processor",
        lambda: transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        _BOI,
        "<start_of_image>",
        {"image_seq_length": 4},
    ),
    "paligemma": ("PaliGemmaProcessor", partial(_siglip, image_seq_length=9), _IMAGE, "<image>", {}),
    "paligemma-2": ("PaliGemmaProcessor", partial(_siglip, image_seq_length=9), _IMAGE, "<image>", {}),
    "gemma4": (
        "Gemma4Processor",
        lambda: transformers.Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70),
        _BOI | _SOUNDS,
        "<image_soft_token>",
        {},
    ),
    "mistral3": (
        PixtralTiles,
        lambda: transformers.PixtralImageProcessorPil(size={"longest_edge": 48}),
        {},
        "[IMG]",
        {"merge": 2},
    ),
    "llava-pixtral": (
        PixtralTiles,
        lambda: transformers.PixtralImageProcessorPil(size={"longest_edge": 48}),
        {},
        "[IMG]",
        {},
    ),
}
"""Class of each family's processor, that of its images, its tokens, what a chat template writes, and settings."""


def config_of(family: str) -> Any:
    return CONFIG_MAPPING[family.split("-")[0]](**CONFIGS[family], tie_word_embeddings=False)


def model_of(family: str, seed: int = 0) -> Any:
    """A random model that sees; large weights, so that its greedy text is not one token for ever."""
    config = config_of(family)
    torch.manual_seed(seed)
    with transformers_loading(), torch.inference_mode(False):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).to(DEVICE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.any():
                parameter.mul_(3)
            elif parameter.dim() > 1:  # as Gemma 3's projector begins
                parameter.normal_(std=0.3)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = EOS
    return model


def processor_of(family: str) -> ImageProcessor:
    """The family's own processor."""
    kind, images, marks, image, settings = PARTS[family]
    words, named = tokenizer(marks, image), getattr(transformers, kind) if isinstance(kind, str) else kind
    parts: dict[str, Any] = {"image_processor": images(), "tokenizer": words, "video_processor": None}
    if "feature_extractor" in named.get_attributes():
        parts["feature_extractor"] = transformers.Gemma4AudioFeatureExtractor()
    given = {part: parts[part] for part in named.get_attributes()}
    return ImageProcessor(without_videos(named)(**given, chat_template=words.chat_template, **settings))


def picture(seed: int, width: int = 24, height: int = 24) -> Image.Image:
    """An image of random blocks, that stays different when it is made smaller."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def asked(text: str, images: int = 1) -> list[dict[str, Any]]:
    """Messages with a text behind some images."""
    return [{"role": "user", "content": [{"type": "image"}] * images + [{"type": "text", "text": text}]}]


def example(processor: ImageProcessor) -> Prompt:
    return processor.encode(asked("What is this?"), [picture(0, 40, 30)])


def base_of(family: str, **settings: Any) -> BaseModel:
    """A target model that sees."""
    return BaseModel(model_of(family), family, example=example(processor_of(family)), **settings)


@cache
def seeing_base(family: str) -> BaseModel:
    """The same, made and proved once for all tests."""
    with torch.inference_mode(False):
        return base_of(family)


@cache
def prompts_of(family: str) -> list[Prompt]:
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
