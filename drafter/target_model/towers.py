"""Vision towers in pieces: few tiles at a time, and with rests between layers, in which others may use the model.

A tower is the model's own code, which knows nothing of this. Tiles do not see each other, so that the same comes out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

T = TypeVar("T")
_PIXELS = 1 << 20  # pixels of the tiles that a tower gets at a time: four of 512 × 512, or 4,096 patches of 16 × 16


class InPieces(Generic[T]):
    """Runs `work` in a thread of its own, and only while `go_on` waits for it: until it rests, or ends.

    Args:
        work: Gets the function by which it rests.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T]) -> None:
        self._work, self._future = work, Future[T]()
        self._turn, self._back, self._closed = threading.Semaphore(0), threading.Semaphore(0), False
        self._thread = threading.Thread(target=self._run, name="in-pieces", daemon=True)
        self._thread.start()

    def go_on(self) -> bool:
        """Do a piece, and return whether it was the last one."""
        self._turn.release()
        self._back.acquire()
        return self._future.done()

    def result(self) -> T:
        """Return what came out of all pieces, or raise the error."""
        return self._future.result()

    def close(self) -> None:
        """Leave what has not been done, and free what it holds."""
        self._closed = True
        self._turn.release()
        self._thread.join()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._closed:
                with torch.inference_mode():
                    self._future.set_result(self._work(self._rest))
        except _Left:
            pass
        except BaseException as error:
            self._future.set_exception(error)
        finally:
            del self._work
            self._back.release()

    def _rest(self) -> None:
        self._back.release()
        self._turn.acquire()
        if self._closed:
            raise _Left


class _Left(BaseException):  # no code of a model catches it
    """Nobody waits for the result any more."""


class Towers:
    """What is in a model beside its language model `decoder`, and has layers of its own."""

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        inside = set(decoder.modules())
        own = [one for one in model.modules() if one not in inside and decoder not in set(one.modules())]
        self._towers = [one for one in own if isinstance(one, PreTrainedModel)]
        layers = [layer for one in own if isinstance(one, nn.ModuleList) for layer in one]
        self._sizes = {layer: _size(layer) for layer in layers}
        self._text_size = _size(decoder)

    @contextmanager
    def few_at_a_time(self) -> Iterator[None]:
        """Within a `with` block, give towers few tiles at a time."""
        with ExitStack() as stack:
            for tower in self._towers:
                stack.enter_context(_replaced(tower, _Grouped(tower.forward)))
            yield

    @contextmanager
    def resting(self, rest: Callable[[], None], tokens: int) -> Iterator[None]:
        """Within a `with` block, call `rest` between layers, after as much work as so many tokens of text take."""
        done = 0

        def before(layer: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            nonlocal done
            if done >= tokens * self._text_size:
                done = 0
                rest()
            rows = next((one for one in (*args, *given.values()) if isinstance(one, Tensor)), None)
            done += 0 if rows is None else rows.numel() // rows.shape[-1] * self._sizes[layer]

        hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in self._sizes]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module).get("forward")  # as where weights are moved in between
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _Grouped:
    """A tower's forward over tiles `[n, 3, H, W]`, few at a time if what comes out can be put together."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **given: Any) -> Any:
        tiles = next((one for one in (*args, *given.values()) if isinstance(one, Tensor)), None)
        # Two at least: of one tile nobody could tell a batch of tiles from a sequence of patches of all.
        size = 0 if tiles is None or tiles.dim() != 4 else max(_PIXELS // tiles[0, 0].numel(), 2)
        if tiles is None or not size or len(tiles) <= size:
            return self._forward(*args, **given)
        groups = []
        for start in range(0, len(tiles), size):
            part = slice(start, start + size)
            some = {name: _part(value, len(tiles), part) for name, value in given.items()}
            groups.append(self._forward(*(_part(one, len(tiles), part) for one in args), **some))
            if start == 0 and not _is_batch(groups[0], size):
                return self._forward(*args, **given)
        return _joined(groups)


def _part(value: Any, count: int, part: slice) -> Any:
    of_each = isinstance(value, Tensor | list | tuple) and len(value) == count
    return value[part] if of_each else value


def _is_batch(value: Any, size: int) -> bool:
    """Return whether all tensors that a tower returns have `size` entries, one of each tile."""
    if isinstance(value, Tensor):
        return value.dim() > 1 and len(value) == size
    if isinstance(value, Mapping):
        return all(_is_batch(one, size) for one in value.values())
    return value is None or (isinstance(value, list | tuple) and all(_is_batch(one, size) for one in value))


def _joined(groups: list[Any]) -> Any:
    first = groups[0]
    if isinstance(first, Tensor):
        return torch.cat(groups)
    if isinstance(first, Mapping):
        return type(first)(**{name: _joined([group[name] for group in groups]) for name in first})
    return None if first is None else type(first)(map(_joined, map(list, zip(*groups, strict=True))))
