"""Hidden states of texts as the target model has them while it decodes: its prompts may have images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafter.errors import RequestError
from drafter.prompt import Prompt
from drafter.target_model.model import BaseModel
from drafter.training.targets import RegeneratedText, base_hidden_states

_TEXTS_AT_ONCE = 8


def needs_sight(base: BaseModel, text: RegeneratedText) -> bool:
    """Return whether a text's token ids alone do not say what the target model reads.

    They do not where the prompt has images, and for models whose prompts' tokens all see each other, of any prompt.
    """
    if text.look is not None:
        return True
    return base.sight is not None and base.sight.reads(Prompt(text.tokens[: text.prompt_length]))


def with_hidden_states(
    base: BaseModel,
    texts: Sequence[RegeneratedText],
    layers: tuple[int, ...],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> list[RegeneratedText]:
    """Return texts with their hidden states, if one of them needs sight; otherwise they stay as they are.

    A batch has the states of all its texts or of none. Arguments and errors are those of `hidden_states`.
    """
    if not any(needs_sight(base, text) for text in texts):
        return list(texts)
    found = zip(texts, hidden_states(base, texts, layers, dtype, device), strict=True)
    return [replace(text, hidden=states, look=None) for text, states in found]


@torch.no_grad()
def hidden_states(
    base: BaseModel,
    texts: Sequence[RegeneratedText],
    layers: tuple[int, ...],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> list[Tensor]:
    """Return the hidden states `[len(text), K · d]` of each text; see `DraftSpec.hidden_layers`.

    Args:
        dtype: Of the result; by default as they are computed.
        device: Where the states of a text go at once; by default they stay on the target model's.

    Raises:
        RequestError: The target model cannot read a text's images.
    """
    found: dict[int, Tensor] = {}
    plain: list[int] = []
    for index, text in enumerate(texts):
        if needs_sight(base, text):
            found[index] = _seen(base, text, layers).to(device, dtype)
        else:
            plain.append(index)
    plain.sort(key=lambda index: len(texts[index].tokens))
    for first in range(0, len(plain), _TEXTS_AT_ONCE):
        group = plain[first : first + _TEXTS_AT_ONCE]
        tokens = pad_sequence([torch.tensor(texts[index].tokens) for index in group], batch_first=True)
        hidden = base_hidden_states(base, tokens.to(base.device), layers)
        for index, states in zip(group, hidden, strict=True):
            found[index] = states[: len(texts[index].tokens)].to(device, dtype)
    return [found[index] for index in range(len(texts))]


def _seen(base: BaseModel, text: RegeneratedText, layers: tuple[int, ...]) -> Tensor:
    """Read a text as the engine does: its prompt by features, and its answer behind that, on the same cache."""
    if base.sight is None:
        raise RequestError(base.blind)
    prompt = Prompt(text.tokens[: text.prompt_length]) if text.look is None else text.look()
    base.sight.refuse(prompt)
    tokens = torch.tensor(list(text.tokens), device=base.device)
    # Autocast would give keys and values another dtype than the cache has.
    with torch.autocast(base.device.type, enabled=False):
        features = base.sight.features(prompt)
        cache, begin = base.new_cache(1, len(tokens)), features.size
        shift = torch.tensor([features.shift], device=base.device)
        read = base.prefill(cache, 0, [tokens[:begin]], hidden_layers=layers, features=features)
        return torch.cat([read, base.prefill(cache, 0, [tokens[begin:]], [begin], layers, shift=shift)])
