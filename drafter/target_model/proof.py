"""Proof at load that tree decoding gives the same logits as the model's own way, on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from drafter import devices
from drafter.errors import LoadError, RequestError, first_line
from drafter.prompt import Prompt
from drafter.target_model.architecture import PASSED, POSITIONS
from drafter.target_model.attention import Packing
from drafter.target_model.cache import TargetCache
from drafter.target_model.formats import scheme_name, scheme_of
from drafter.target_model.forward import Executor
from drafter.target_model.kv_cache import LayerShape, cache_name
from drafter.target_model.mixers import state_shapes
from drafter.target_model.nodes import LM_HEAD_INPUT, PromptNodes, TreeNodes, prompt_nodes
from drafter.target_model.sight import Features, Sight
from drafter.target_model.state_cache import LayerStates

_MODEL_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that a model's code may raise when called in an unsupported way."""
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1
"""Largest difference of logits ÷ the largest logit, in fp32 and in half precision."""
_PROMPTS, _STEPS = (11, 26), 4
"""Lengths of two prompts, and of the continuation of each. The second is longer than two windows of `PASSED` tokens."""
_TREE, _PATH = (-1, 0, 0, 2, 2), (0, 2, 4)
"""Parents in the proof's trees, and the path of the true continuation; a decoy precedes each of its nodes."""
_SMALL_TREES = ((-1, 0, 0, 2), (-1, 0, 1, 2), (-1, 0, 0, 2))  # parents in the trees of three texts
_SHORT, LONG = 12, 520  # tokens of the longest text; `LONG` is enough to be read in several parts
_LAST = (LM_HEAD_INPUT,)
Forward = Callable[[TargetCache, PromptNodes | TreeNodes], tuple[Tensor | None, Tensor]]


class Candidate(Protocol):
    """The part of `BaseModel` that the proofs need."""

    model: Any
    config: Any
    name: str
    dtype: torch.dtype
    max_positions: int | None
    vocab_size: int

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, slots: int, length: int) -> TargetCache: ...

    def forward(self, cache: TargetCache, nodes: PromptNodes | TreeNodes) -> tuple[Tensor | None, Tensor]: ...


@torch.inference_mode()
def run_plainly(
    base: Candidate, longest: int = _PROMPTS[1] + _STEPS
) -> tuple[list[Tensor], list[Tensor], list[LayerShape | None], LayerStates]:
    """Run two texts `[P + 4]`, of 15 and `longest` tokens, the model's own way, each by itself.

    Returns:
        Texts, the logits `[P + 4, V]` of each, the cached shape of each layer (None for one that caches nothing by
        position), and the shapes of recurrent states.

    Raises:
        LoadError: The model does not run with a cache.
    """
    room = (base.max_positions or longest) - _STEPS
    lengths = [max(1, min(length, room)) + _STEPS for length in (_PROMPTS[0], longest - _STEPS)]
    ids = 1 + torch.arange(1, sum(lengths) + 1, device=base.device) * 7919 % max(base.vocab_size - 2, 1)
    texts: list[Tensor] = list(ids.split(lengths))
    try:
        logits, layers = _logits_and_layers(base, texts)
        counting = base.device.type == "meta"  # where sizes are counted, without numbers
        if not counting and not all(_sound(some).all() for some in logits):  # such tokens prove nothing
            alone = base.model(input_ids=ids[:, None]).logits
            if not (sound := ids[_sound(alone)[:, 0]]).numel():
                raise LoadError(
                    f"{base.name}: its logits after any token are NaN or infinite in {str(base.dtype)[6:]}: its "
                    "weights are damaged, or need another dtype, such as float32"
                )
            texts = list(sound.repeat(len(ids))[: len(ids)].split(lengths))
            logits, layers = _logits_and_layers(base, texts)
    except LoadError:
        raise
    except _MODEL_ERRORS as error:
        raise _does_not_run(base, "on token ids with a KV cache", error) from error
    return texts, logits, [_layer_shape(layer) for layer in layers], state_shapes(layers)


def _logits_and_layers(base: Candidate, texts: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    logits, cache, name = [], None, cache_name(base.model)
    for text in texts:
        plain = base.model(input_ids=text[None], use_cache=True, **{name: DynamicCache(config=base.config)})
        if (cache := getattr(plain, name, None)) is None:
            _refuse_encoder(base, text, plain.logits[0])
            raise LoadError(f"{base.name}: {base.model.config.model_type} has no KV cache; it cannot be a target model")
        logits.append(plain.logits[0])
    assert cache is not None  # there are texts
    return logits, cache.layers


@torch.inference_mode()
def prove_tree_decoding(base: Candidate, texts: list[Tensor], plain: list[Tensor]) -> None:
    """Run the texts of `run_plainly` as the engine does, and refuse the model if the logits are not the `plain` ones.

    Two rows of different lengths, with a free slot between them, are prefilled and verified together, by a draft tree
    and then plainly. Decoys before the true continuation expose a model that ignores the mask or the positions.

    Raises:
        LoadError: The model does not run with a tree mask and a slot cache, or gives other logits.
    """
    kind = base.model.config.model_type
    try:
        found, widths = _run_as_engine(base, texts)
    except _MODEL_ERRORS as error:
        how = "with the mask of a draft tree, explicit positions and a slot cache, though it runs by itself"
        raise _does_not_run(base, how, error) from error
    for text, logits, expected in zip(texts, found, plain, strict=True):
        if not _alike(logits, expected[-len(logits) :], base.dtype):
            _refuse_encoder(base, text, expected)
            raise LoadError(
                f"{base.name}: {kind} gives other logits with a tree mask, explicit positions and a slot cache than by "
                "itself; it cannot be a target model (ALiBi, and models that make windows of their own, cannot)"
            )
    if len(widths) > 1:
        raise LoadError(f"{base.name}: the decoder's output is not the LM head's input; it cannot be a target model")


def _refuse_encoder(base: Candidate, text: Tensor, logits: Tensor) -> None:
    """Raise `LoadError` if a model's logits `[P, V]` after the beginning of a text depend on the rest of it.

    Those of a quantised model do where its activations are quantised, too.
    """
    if (scheme := scheme_of(base.model.config)) is not None:
        raise LoadError(
            f"{base.name}: its logits depend on how a text is read, as they do where activations are rounded, too "
            f"(it is quantised by {scheme_name(scheme)}): load it dequantised (loading.dequantize true, in Python "
            "dequantize=True)"
        )
    beginning = text[: len(text) // 2]
    if not _alike(base.model(input_ids=beginning[None]).logits[0], logits[: len(beginning)], base.dtype):
        raise LoadError(
            f"{base.name}: {base.model.config.model_type} reads in both directions, as encoders do; it cannot be a "
            "target model"
        )


def prove_last_positions(base: Candidate) -> None:
    """Repeat the proof with a text of all positions, if they are few, as in a small copy: its tree goes past them.

    Raises:
        LoadError: As `prove_tree_decoding`, for instance where the model's code has a mask of just so many entries.
    """
    if base.max_positions is None or base.max_positions > POSITIONS:
        return
    texts, plain, _, _ = run_plainly(base, base.max_positions)
    try:
        prove_tree_decoding(base, texts, plain)
    except LoadError as error:
        raise LoadError(f"{error}; so it is at its last positions, past which draft trees go") from error


@torch.inference_mode()
def prove_images(base: Candidate, sight: Sight, example: Prompt, text: Tensor) -> None:
    """Repeat the proof with a prompt with an image behind a text `[P + 4]` of `run_plainly`.

    The model's own logits are those with its own cache: what it sees of a prompt need not be causal.

    Raises:
        RequestError: The model cannot read the example.
        LoadError: It does not run as the engine reads it, or gives other logits.
    """
    sight.refuse(example)
    prompts = (Prompt(text[:-_STEPS].tolist()), example)
    try:
        own = [_read_with_cache(base, sight, prompt, text[-_STEPS:]) for prompt in prompts]
        seen, peak = devices.peak_bytes(base.device, lambda: sight.features(example))
        sight.bytes_per_token = -(-peak // seen.size)
        features = [sight.features(prompts[0]) if sight.reads(prompts[0]) else None, seen]
        found, _ = _run_as_engine(base, [ids for ids, _ in own], features)
    except RequestError:
        raise
    except _MODEL_ERRORS as error:
        raise _does_not_run(base, "on features of an image with the mask of a draft tree", error) from error
    if not _all_alike(found, [logits for _, logits in own], base.dtype):
        kind = base.model.config.model_type
        raise LoadError(f"{base.name}: {kind} gives other logits after an image with a tree mask than by itself")


def _read_with_cache(base: Candidate, sight: Sight, prompt: Prompt, following: Tensor) -> tuple[Tensor, Tensor]:
    """Return a prompt and what follows it `[P + 4]`, and the model's logits after the last five of these `[5, V]`."""
    name = cache_name(base.model)
    ids = torch.tensor(list(prompt.ids), device=base.device)
    if not sight.reads(prompt):  # not with the cache: some models move texts as they moved the images before
        both = torch.cat([ids, following])
        return both, base.model(input_ids=both[None]).logits[0, -len(following) - 1 :]
    cache = {name: DynamicCache(config=base.config)}
    step = base.model(input_ids=ids[None], use_cache=True, **sight.tensors(prompt), **cache)
    logits = [step.logits[0, -1:]]
    for token in following:  # one by one, as some models' tokens of one forward see each other
        step = base.model(input_ids=token[None, None], use_cache=True, **{name: getattr(step, name)})
        logits.append(step.logits[0])
    return torch.cat([ids, following]), torch.cat(logits)


def _run_as_engine(
    base: Candidate, texts: list[Tensor], features: Sequence[Features | None] = (None, None)
) -> tuple[list[Tensor], set[int]]:
    """Return the last logits `[5, V]` of each text, in slots 0 and 2, and the widths of the hidden states.

    `features` are those of prompts that are read by them.
    """
    slots, device = (0, 2), base.device
    prompts = [len(text) - _STEPS for text in texts]
    cache = base.new_cache(3, max(prompts) + _STEPS + len(_TREE))
    free = cache.length - len(_TREE)
    ends: list[Tensor] = []
    widths: set[int] = set()

    def run(nodes: PromptNodes | TreeNodes) -> Any:
        logits, hidden = base.forward(cache, nodes)
        widths.add(hidden.shape[-1])
        return logits

    for slot, text, length, seen in zip(slots, texts, prompts, features, strict=True):
        half = length // 2 if seen is None or seen.borders is None else seen.borders.before(length // 2)
        if half:
            first = None if seen is None else seen.part(0, half)
            run(prompt_nodes(slot, [text[:half]], [0], _LAST, features=first))
        second = None if seen is None else seen.part(half, length)
        ends.append(run(prompt_nodes(slot, [text[half:length]], [half], _LAST, 1, features=second)))
    shifts = [0 if seen is None else seen.shift for seen in features]
    shift = torch.tensor([shifts[0], 0, shifts[1]], device=device) if any(shifts) else None

    def verify(trees: list[Tensor], parents: Sequence[int], lengths: list[int]) -> Tensor:
        before = torch.tensor([lengths[0], free, lengths[1]], device=device)
        tokens = torch.stack([trees[0], trees[0][:1].expand(len(parents)), trees[1]])
        nodes = _tree_nodes(tokens, before, [parents] * 3, max(lengths) + len(parents), full=free, shift=shift)
        logits: Tensor = run(nodes)
        return logits[list(slots)]

    next_ones = [text[-_STEPS:] for text in texts]
    decoyed = [torch.stack([some[0], some[3], some[1], some[0], some[2]]) for some in next_ones]
    drafted = verify(decoyed, _TREE, prompts)[:, list(_PATH)]
    cache.commit(
        torch.tensor([prompts[0], free, prompts[1]], device=device),
        torch.tensor([_PATH, (0, 0, 0), _PATH], device=device),
        slice(0, 3),
    )
    after = [length + len(_PATH) for length in prompts]
    plain = verify([some[3:] for some in next_ones], _TREE[:1], after)
    return [torch.cat(parts) for parts in zip(ends, drafted, plain, strict=True)], widths


def attention_agrees(base: Candidate, change: Callable[[], None], longest: int = _SHORT) -> bool:
    """Compare a long, a short and an empty text before a change of attention and, also packed, after it."""
    return _agree_after(base, change, (min(longest, (base.max_positions or 2 * longest) // 2), 6, 0), (False, True))


def mixers_agree(base: Candidate, change: Callable[[], None]) -> bool:
    """Compare two texts before a change of mixers and after it."""
    return _agree_after(base, change, (24, 16), (False,))


@torch.inference_mode()
def _agree_after(base: Candidate, change: Callable[[], None], lengths: Sequence[int], packings: Sequence[bool]) -> bool:
    before = _answers(base, base.forward, lengths)
    change()
    try:
        after = [_answers(base, base.forward, lengths, packed=packed) for packed in packings]
    except _MODEL_ERRORS:
        return False
    return all(_all_alike(some, before, base.dtype) for some in after)


@torch.inference_mode()
def executors_agree(base: Candidate, one: Executor, other: Executor) -> bool:
    """Compare two executors on two texts, which are longer than their windows are meanwhile."""
    with one.windows_up_to(PASSED), other.windows_up_to(PASSED):
        ours, theirs = (_answers(base, executor.forward, (24, 16)) for executor in (one, other))
    return _all_alike(ours, theirs, base.dtype)


def _answers(base: Candidate, forward: Forward, lengths: Sequence[int], *, packed: bool = False) -> list[Tensor]:
    """Run texts of these lengths, a tree and a single node behind each, and the end of the first text.

    With `packed` the texts share a forward, and the trees are run without padding.
    """
    # The tokens are spread over the vocabulary.
    ids = torch.arange(1, sum(lengths) + 4 * len(lengths) + 13, device=base.device) * 7919 % base.vocab_size
    *texts, drafted, end = ids.split([*lengths, 4 * len(lengths), 12])
    texts = [text for text in texts if len(text)]
    cache = base.new_cache(len(lengths), max(lengths) + 16)  # a new one, where no earlier run has left anything
    if packed:
        hidden = [forward(cache, prompt_nodes(0, texts, [0] * len(texts), _LAST))[1]]
    else:
        hidden = [forward(cache, prompt_nodes(row, [text], [0], _LAST))[1] for row, text in enumerate(texts)]
    answers = [torch.cat(hidden)]
    before = torch.tensor(lengths, device=base.device)
    real = torch.ones(len(lengths), 4, dtype=torch.bool, device=base.device)
    real[2:, -1] = False
    for size in (4, 1):
        packing = Packing.of(real) if packed and size > 1 else None
        tokens = drafted.view(-1, 4)[:, :size]
        trees = [tree[:size] for tree in _SMALL_TREES[: len(lengths)]]
        nodes = _tree_nodes(tokens, before, trees, max(lengths) + 4, packing)
        answers += [part[real[:, :size]] for part in forward(cache, nodes) if part is not None]
    found = forward(cache, prompt_nodes(0, [end], [lengths[0]], _LAST, 1))
    return [*answers, *(part for part in found if part is not None)]


def _tree_nodes(
    tokens: Tensor,
    lengths: Tensor,
    trees: Sequence[Sequence[int]],
    kv_length: int,
    packing: Packing | None = None,
    full: int | None = None,
    shift: Tensor | None = None,
) -> TreeNodes:
    """Return the nodes of each row's tree, given by the parents."""
    device = lengths.device
    ancestors = torch.stack([_ancestors(tree) for tree in trees]).to(device)
    return TreeNodes(
        tokens=tokens,
        lengths=lengths,
        positions=lengths[:, None] + ancestors.sum(2) - 1,
        shift=shift,
        kv_length=kv_length,
        packing=packing,
        parents=torch.tensor(trees, device=device),
        ancestors=ancestors,
        full=full,
    )


def _ancestors(parents: Sequence[int]) -> Tensor:
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        ancestors[node] |= ancestors[parent]
    return ancestors


def _all_alike(ours: Sequence[Tensor], theirs: Sequence[Tensor], dtype: torch.dtype) -> bool:
    return all(_alike(one, other, dtype) for one, other in zip(ours, theirs, strict=True))


def _does_not_run(base: Candidate, how: str, error: BaseException) -> LoadError:
    return LoadError(
        f"{base.name}: {base.model.config.model_type} does not run {how} "
        f"({type(error).__name__}: {first_line(error)}); it cannot be a target model"
    )


def _alike(logits: Tensor, others: Tensor, dtype: torch.dtype) -> bool:
    logits, others = logits.float(), others.float()
    scale = others.abs().masked_fill(others.isinf(), 0).amax().clamp_min(1e-6)
    # Some models give -inf to the rows of their vocabulary that are no tokens.
    difference = (logits - others).masked_fill(logits == others, 0).abs().amax() / scale
    return bool(difference < (_TOLERANCE if dtype == torch.float32 else _HALF_TOLERANCE))


def _sound(logits: Tensor) -> Tensor:
    """Return whether logits `[..., V]` have neither NaN nor +inf, `[...]`: their maximum is NaN if any of them is."""
    return logits.amax(-1).isfinite()


def _layer_shape(layer: Any) -> LayerShape | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)
