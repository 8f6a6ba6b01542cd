"""What a target model that sees makes of a prompt with images: its own forward, up to the call of its language model.

Vision tower, projector, merging and positions are all the model's own code. What its language model is called with are
the prompt's *features*; the engine calls it with parts of these, and with its own cache and masks.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from drafter import devices
from drafter.errors import EngineError, RequestError, one_line
from drafter.prompt import Prompt
from drafter.target_model.towers import InPieces, Towers

KEPT_BYTES = 256 << 20
"""Bytes of images' features that are kept for prompts with the same images."""
_OWN = frozenset({"input_ids", "attention_mask", "past_key_values", "use_cache", "cache", "cache_position"})
"""What the engine gives the language model itself."""
_HEAVY = ("last_hidden_state", "hidden_states", "attentions")  # of a vision tower's output, which no prompt needs
_ENCODED = "mm_encoder_outputs"  # by which a model's forward takes images that are encoded
_DEEP, _DEEP_AT = "deepstack_visual_embeds", "visual_pos_masks"
"""States that are added to the first layers' outputs (DeepStack, arXiv 2406.04334), and where: `[V, d]`, `[1, P]`."""


class Borders:
    """Places where a prompt may be cut in two: no token before one sees a token behind it.

    Args:
        last: `[P]` position of the last token that each token sees.
    """

    def __init__(self, last: npt.NDArray[np.int64]) -> None:
        behind = np.maximum.accumulate(last) + 1
        places = np.arange(1, len(last) + 1)
        self._places, self._size = np.concatenate([[0], places[behind == places]]), len(last)

    def before(self, place: int) -> int:
        """Return the last border up to `place`."""
        return place if place >= self._size else int(self._places[self._places <= place][-1])

    def behind(self, place: int) -> int:
        """Return the first border from `place` on."""
        return place if place >= self._size else int(self._places[self._places >= place][0])

    def cut(self, start: int, stop: int) -> int:
        """Return a border behind `start` that is up to `stop`; if there is none, the next one."""
        found = self.before(stop)
        return found if found > start else self.behind(start + 1)


@dataclass(frozen=True)
class Features:
    """What the language model gets of P tokens of a prompt.

    Args:
        inputs: Arguments of its forward, such as `inputs_embeds` `[1, P, d]` and `position_ids` `[3, 1, P]`.
        seen: `[P, 2]` first and last position that each token sees in layers of a kind of attention, by transformers'
            name of the kind. Without one for a kind, its tokens see no later ones there, as in a text.
        borders: Where these tokens may be cut; None if everywhere.
        shift: What is to be added to the position of a token behind the prompt.
    """

    inputs: Mapping[str, Any]
    size: int
    seen: Mapping[str, Tensor] = field(default_factory=dict)
    borders: Borders | None = None
    shift: int = 0

    def part(self, start: int, stop: int) -> Features:
        """Return the features of tokens `start … stop − 1`."""
        inputs = {name: self._part(name, value, start, stop) for name, value in self.inputs.items()}
        seen = {kind: spans[start:stop] for kind, spans in self.seen.items()}
        return Features(inputs, stop - start, seen, shift=self.shift)

    def _part(self, name: str, value: Any, start: int, stop: int) -> Any:
        if name == _DEEP:
            before, until = (int(self.inputs[_DEEP_AT][0, :end].sum()) for end in (start, stop))
            return [states[before:until] for states in value]
        return value[..., start:stop] if name == "position_ids" else value[:, start:stop]

    def masks(self, length: int) -> dict[str, Tensor]:
        """Return which of the first `length` positions each token sees, `[1, P, length]` bool, by kind as `seen`."""
        found = {}
        for kind, spans in self.seen.items():
            place = torch.arange(length, device=spans.device)
            found[kind] = ((spans[:, :1] <= place) & (place <= spans[:, 1:]))[None]
        return found


class _Reached(Exception):  # noqa: N818 (nothing has failed)
    """The language model was called with these arguments."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class Sight:
    """Makes features of prompts with images, by a transformers `model` whose language model is its `decoder`.

    Args:
        kinds: Of the decoder's attention, by transformers' names.
        inputs: Names of the inputs of a prompt with an image, by which the model is proved to read such.
        whole: Of other prompts, too: where the model makes no mask, all tokens of a prompt see each other.

    Attributes:
        bytes_per_token: A GPU's memory that features of a prompt take while they are computed, for each of its tokens.
    """

    def __init__(
        self, model: Any, decoder: nn.Module, kinds: Collection[str], inputs: Collection[str], *, whole: bool = False
    ) -> None:
        self._model, self._decoder, self._kinds, self._whole = model, decoder, kinds, whole
        self._inputs = frozenset(inputs)
        self._taken = inspect.signature(model.forward).parameters
        self.placeholder: int | None = getattr(model.config, "image_token_id", None)
        self.bytes_per_token = 0
        # As transformers' `generate` does: it encodes images first, and hands their features to the model's forward.
        self._encode: Callable[..., Any] | None = getattr(model.base_model, "get_image_features", None)
        self._towers = Towers(model, decoder)
        self._kept: OrderedDict[tuple[str, tuple[tuple[int, bytes], ...]], tuple[Any, int]] = OrderedDict()

    def reads(self, prompt: Prompt) -> bool:
        """Return whether a prompt is read by its features."""
        return self._whole or bool(prompt.inputs)

    def refuse(self, prompt: Prompt) -> None:
        """Raise `RequestError` for a prompt whose images the model cannot take."""
        if prompt.spans and not prompt.inputs:
            raise RequestError("the prompt has places of images without their inputs, such as pixel_values")
        if unknown := sorted(name for name in prompt.inputs if name not in self._taken):
            raise RequestError(f"the model takes no {', '.join(unknown)}: its processor is another model's")
        if unread := sorted(prompt.inputs.keys() - self._inputs):
            raise RequestError(f"the prompt has {', '.join(unread)}, and images alone are read: leave that out")
        if prompt.inputs and not prompt.spans:
            raise RequestError(f"the prompt has {', '.join(sorted(prompt.inputs))}, and no span of tokens for an image")
        if prompt.spans and prompt.spans[-1].stop == len(prompt.ids):
            raise RequestError("the prompt ends with an image: let text follow it")
        outside = np.asarray(prompt.ids) == self.placeholder
        for span in prompt.spans:
            outside[span.start : span.stop] = False
        if outside.any():  # also in a mere text: the answer would be made up
            raise RequestError(f"the prompt has the token {self.placeholder}, which stands for images, without one")

    def features(self, prompt: Prompt, salt: str = "") -> Features:
        """Return the features of a prompt with images. Those of its images are kept for prompts of the same `salt`.

        Raises `RequestError` if the model cannot take its images.
        """
        ids = devices.send(torch.tensor([list(prompt.ids)]), self._model.device)
        try:
            with self._towers.few_at_a_time():
                inputs = self._encoded(prompt, salt)
                arguments = call_of(self._decoder, lambda: self._model(input_ids=ids, use_cache=False, **inputs))
        except (torch.OutOfMemoryError, EngineError):
            raise
        except Exception as error:  # a model's code may raise anything for what it was not made for
            raise RequestError(f"the model cannot read these images: {one_line(error, 200)}") from error
        return self._features(arguments, ids.shape[1])

    def in_pieces(self, prompt: Prompt, salt: str, tokens: int) -> InPieces[Features]:
        """Return `features` to be computed in pieces, each of about as much work as so many tokens of text take."""

        def work(rest: Callable[[], None]) -> Features:
            with self._towers.resting(rest, tokens):
                return self.features(prompt, salt)

        return InPieces(work)

    def forget(self) -> None:
        """Free what is kept of images."""
        self._kept.clear()

    def tensors(self, prompt: Prompt) -> dict[str, Tensor]:
        """Return the prompt's inputs on the model's device, floats in its dtype."""
        return {name: self._tensor(value) for name, value in prompt.inputs.items()}

    def _features(self, arguments: Mapping[str, Any], size: int) -> Features:
        inputs: dict[str, Any] = {}
        shift = 0
        for name, value in arguments.items():
            if name in _OWN or not isinstance(value, Tensor | list | tuple):
                continue  # switches, and what is not there
            sound = name == _DEEP or (isinstance(value, Tensor) and _has_axis(name, value, size))
            if not sound:
                raise RequestError(f"the language model gets {name} of a prompt, which cannot be split")
            inputs[name] = value
        if (positions := inputs.get("position_ids")) is not None:
            if positions.dim() == 3 and positions.shape[0] == 4:  # the text's own come first
                positions = positions[1:]
            shift = int(positions.max()) + 1 - size
        masks, device = arguments.get("attention_mask"), arguments["inputs_embeds"].device
        seen: dict[str, Tensor] = {}
        for kind in self._kinds:
            mask = masks.get(kind) if isinstance(masks, Mapping) else masks
            if isinstance(mask, Tensor) and mask.dim() == 4:
                if (spans := _seen_by(mask[0, 0], size)) is not None:
                    seen[kind] = spans
            elif self._whole:
                seen[kind] = torch.tensor([0, size - 1], device=device).expand(size, 2)
        if not seen:
            return Features(inputs, size, shift=shift)
        last = torch.stack([spans[:, 1] for spans in seen.values()]).amax(0)
        return Features(inputs, size, seen, Borders(last.cpu().numpy()), shift)

    def _encoded(self, prompt: Prompt, salt: str) -> dict[str, Any]:
        """Return the prompt's inputs, with its images encoded, or as they were kept."""
        inputs = self.tensors(prompt)
        if self._encode is None or _ENCODED not in self._taken or not prompt.spans:
            return inputs
        # As in keys of texts. With the salt: how long a prompt takes would tell what others have sent.
        images = prompt.salted(salt), tuple((span.stop - span.start, span.digest) for span in prompt.spans)
        if images not in self._kept:
            taken = inspect.signature(self._encode).parameters
            found = self._encode(**{name: value for name, value in inputs.items() if name in taken}, return_dict=True)
            light = type(found)(**{name: value for name, value in found.items() if name not in _HEAVY})
            self._kept[images] = light, sum(tensor.nbytes for tensor in _tensors(light))
            while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(images)
        others = {name: value for name, value in inputs.items() if not name.startswith("pixel")}
        return {**others, _ENCODED: {"image": self._kept[images][0]}}

    def _tensor(self, value: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(np.array(value))  # a copy: a prompt of a job is a view of shared memory
        if tensor.is_floating_point():
            tensor = tensor.to(self._model.dtype)
        return devices.send(tensor, self._model.device)


def call_of(decoder: nn.Module, run: Callable[[], Any]) -> dict[str, Any]:
    """Return what `run` calls `decoder` with, which is not run; raise `RuntimeError` if it does not call it."""
    caller = threading.get_ident()

    def stop(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        if threading.get_ident() == caller:  # others may call it while `run` rests
            raise _Reached(given)

    hook = decoder.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        run()
    except _Reached as reached:
        return reached.arguments
    finally:
        hook.remove()
    raise RuntimeError("its forward does not call its language model")


@contextmanager
def called_with(decoder: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Within a `with` block, call `decoder` with these arguments, whatever else it is called with."""

    def change(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**given, "input_ids": None, **arguments}

    hook = decoder.register_forward_pre_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _has_axis(name: str, value: Tensor, size: int) -> bool:
    if name == "position_ids":
        return value.shape[-1] == size
    return value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == size


def _seen_by(mask: Tensor, size: int) -> Tensor | None:
    """Return the first and the last position `[P, 2]` that each token sees by a mask; None where it sees none behind.

    Raises `RequestError` if a token does not see all between these.
    """
    seen = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)[:, :size]
    first, last = seen.int().argmax(-1), size - 1 - seen.flip(-1).int().argmax(-1)
    if torch.equal(last, torch.arange(size, device=last.device)):
        return None
    if not torch.equal(seen.sum(-1), last - first + 1):
        raise RequestError("a token of the prompt does not see all tokens from the first to the last that it sees")
    return torch.stack([first, last], 1)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for one in value.values() for tensor in _tensors(one))
    elif isinstance(value, list | tuple):
        yield from (tensor for one in value for tensor in _tensors(one))
