"""The target model: any decoder-only causal LM of transformers that passes the proof, its modeling code unforked."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drafter import devices
from drafter.errors import LoadError, RequestError, one_line
from drafter.native.build import BuildError, UnsuitableError
from drafter.native.coded import Stored
from drafter.prompt import Prompt
from drafter.target_model.architecture import (
    NO_PLACE,
    attention_kinds,
    decoder_of,
    has_table,
    lengths_beyond,
    max_positions,
    names_window,
    refuse_unsupported,
    small_copy,
    state_layers,
    target_fingerprint,
)
from drafter.target_model.attention import TREE_ATTENTION, prefix_attention_on, query_groups
from drafter.target_model.cache import Blocks, CacheBytes, TargetCache
from drafter.target_model.cache_factory import CacheFactory
from drafter.target_model.forward import DecoderLayers, Executor, ModelCode
from drafter.target_model.kv_cache import KVCache
from drafter.target_model.mixers import find_mixers, run_by_own_code, run_natively
from drafter.target_model.native_decoder import NativeDecoder
from drafter.target_model.nodes import LM_HEAD_INPUT, PromptNodes, TreeNodes, prompt_nodes
from drafter.target_model.prepacked import prepack
from drafter.target_model.proof import (
    LONG,
    attention_agrees,
    executors_agree,
    mixers_agree,
    prove_images,
    prove_last_positions,
    prove_tree_decoding,
    run_plainly,
)
from drafter.target_model.sight import Features, Sight
from drafter.target_model.stored_weights import keep_coded, restore

_log = logging.getLogger(__name__)


class BaseModel:
    """A frozen target model that verifies draft trees.

    Args:
        model: A transformers causal LM, on its device(s).
        name: Hub id or path; goes into draft heads' configuration.
        native: Use the native executor where it can run the model.
        example: A prompt with an image, with which reading images is proved. Without one, none are read.
        weights: What the weights are, in words; by default their type.
        before_adapter: `target_fingerprint` of the model before an adapter was merged into it.
        stored: How a file stores weights, by their names: the native executor reads them so, in place of the model's.
        ranks: Processes that have a part of the model each, and all make this object at the same time.

    Attributes:
        fingerprints: Its own, and that before an adapter: heads that were made for either draft for it.
        sight: What reads prompts with images; None if the model reads none, for the reason `blind`.
        others: The other processes, where this is the first of several; see `drafter.ranks`.
        weights_version: How often `update_weights` has been called.

    Raises:
        LoadError: The model cannot verify draft trees; the message names it and the reason.
    """

    def __init__(
        self,
        model: Any,
        name: str = "",
        *,
        native: bool = True,
        example: Prompt | None = None,
        weights: str = "",
        before_adapter: str | None = None,
        stored: Mapping[str, Stored] | None = None,
        ranks: int = 1,
    ) -> None:
        self.name = name or model.config.name_or_path or type(model).__name__
        refuse_unsupported(self.name, model.config)
        self.model, self.ranks = model.eval().requires_grad_(False), ranks
        self.others: Any = None
        if model.device.type == "cuda":
            # cuDNN plans each new shape, which takes longer than most prompts; the other kernels take masks, too.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.config = model.config.get_text_config(decoder=True)
        recurrent = state_layers(self.config)
        # A hybrid's configuration may say that all its layers are attention, as that of Granite 4.0 Micro does.
        if getattr(model, "_is_stateful", False) and not recurrent and not getattr(self.config, "layer_types", None):
            raise LoadError(
                f"{self.name}: {model.config.model_type} keeps a recurrent state of its own kind; {NO_PLACE}"
            )
        self._head: nn.Module = model.get_output_embeddings()
        self._embedding: nn.Module = model.get_input_embeddings()
        if self._head is None or self._embedding is None:
            raise LoadError(f"{self.name}: {model.config.model_type} has no LM head")
        self.num_layers, self.vocab_size = int(self.config.num_hidden_layers), int(self.config.vocab_size)
        self.hidden_size = int(self._head.weight.shape[1])
        self.decoder: nn.Module = decoder_of(model)  # without the LM head
        self.layers = DecoderLayers(self.decoder, self.num_layers, self.name)
        self.dtype: torch.dtype = model.dtype
        self.weights = weights or str(model.dtype).removeprefix("torch.")
        self.fingerprint = target_fingerprint(model)
        self.fingerprints = frozenset({self.fingerprint, before_adapter or self.fingerprint})
        self.max_positions = max_positions(self.config)
        self._model_code = ModelCode(model, self.decoder, self.layers, self.config, self.device)
        self._executor: Executor = self._model_code
        texts, logits, shapes, states = run_plainly(self)
        self.caches = CacheFactory(self.name, self.num_layers, shapes, states)
        if recurrent:
            kind = model.config.model_type
            self.caches.mixers = find_mixers(self.decoder, states, recurrent, self.hidden_size, self.name, kind)
        self.sight: Sight | None = None
        self.blind = f"{self.name} reads text alone"
        try:
            prove_tree_decoding(self, texts, logits)
        except LoadError:
            if example is None or not self._open_eyes(example, texts[-1], whole=True):
                raise
        else:
            prove_last_positions(self)
            self._prove_long_texts()
            if example is not None:
                self._open_eyes(example, texts[-1])
        if native and ranks == 1:
            self._mix_natively()
            self._executor = self._native(stored) or self._model_code
        self.cache_bytes: CacheBytes = self.caches.over(Blocks(1, 1, self.device), self.device).bytes
        if ranks == 1:  # kernels are chosen by their times, and what all ranks compute must be the same to the last bit
            self._prepack()
        self.weights_version = 0

    @torch.no_grad()
    def update_weights(self, weights: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy weights into place, paired (own, new) by `match_weights`, and make again what was derived from them.

        No forward may run meanwhile. What was proved at load stays proved: it depends on the structure alone.
        """
        native = self._executor is not self._model_code
        self._executor = self._model_code  # the native executor's copies are freed before others are made
        for own, new in weights:
            own.copy_(new)
        run_natively(mixer for mixer in self.caches.mixers if mixer.native is not None)
        if native:
            self._executor = NativeDecoder(self.model, self.decoder, self.config)
        self._prepack()
        if self.sight is not None:
            self.sight.forget()
        self.fingerprint = target_fingerprint(self.model)
        self.fingerprints = frozenset({self.fingerprint})
        self.weights_version += 1

    def _prove_long_texts(self) -> None:
        """Prove on a small copy what short texts do not show: windows, chunks, all that depends on the length."""
        lengths = lengths_beyond(self.config, self.max_positions)
        if not lengths and not has_table(self.model, self.max_positions):
            return
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        try:
            copy = small_copy(self.model, self.max_positions)
        except Exception as error:  # a model's code may raise anything for sizes that it was not made for
            if not (windows := [name for name in lengths if names_window(name)]):
                _log.debug("%s has no small copy: %s", self.name, error)
                return
            raise LoadError(
                f"{self.name}: {self.model.config.model_type} has {', '.join(windows)}, and no small copy can be made "
                f"to prove what it does with longer texts ({one_line(error, 200)}); it cannot be a target model"
            ) from error
        try:
            BaseModel(copy, self.name, native=False)
        except LoadError as error:
            where = f" with texts longer than {listed}" if lengths else ""
            raise LoadError(f"{error}; so it is{where}, tried on a small copy") from error

    def _open_eyes(self, example: Prompt, text: Tensor, *, whole: bool = False) -> bool:
        """Prove that prompts with images are read as the model does; if not, note why, and return False."""
        sight = Sight(self.model, self.decoder, attention_kinds(self.config), example.inputs, whole=whole)
        try:
            prove_images(self, sight, example, text)
        except (LoadError, RequestError) as reason:
            self.blind = f"{self.name} reads no images here: {reason}"
            _log.warning("%s", self.blind)
            return False
        self.sight = sight
        return True

    def _prepack(self) -> None:
        # What runs natively has weights of its own. Of a native executor the LM head is left: draft heads call it.
        whole = self.model if self._executor is self._model_code else self._head
        prepack(whole, but=[mixer.module for mixer in self.caches.mixers if mixer.native is not None])

    def _mix_natively(self) -> None:
        mixers = self.caches.mixers
        try:
            if mixers and not mixers_agree(self, partial(run_natively, mixers)):
                run_by_own_code(mixers)
                _log.warning("%s mixes by its own code: the native one gives other numbers", self.name)
        except BuildError as reason:
            _log.warning("%s mixes by its own code, which is slower than the native one: %s", self.name, reason)

    def _native(self, stored: Mapping[str, Stored] | None) -> Executor | None:
        try:
            native = NativeDecoder(self.model, self.decoder, self.config, stored)
        except UnsuitableError as reason:
            _log.debug("%s runs by its own code: %s", self.name, reason)
            return None
        except BuildError as reason:
            _log.warning("%s runs by its own code, which is slower than the native one: %s", self.name, reason)
            return None
        if not executors_agree(self, self._model_code, native):
            _log.warning("%s runs by its own code: the native one gives other numbers", self.name)
            return None
        if native.coded:
            keep_coded(self.model, native.coded)
            devices.give_back()
        return native

    @property
    def device(self) -> torch.device:
        """Device that takes token ids and returns logits."""
        return self._embedding.weight.device  # type: ignore[return-value]

    @property
    def devices(self) -> set[torch.device]:
        """All devices of the weights."""
        return {parameter.device for parameter in self.model.parameters()}

    @property
    def kv_bytes_per_token(self) -> list[int]:
        """Bytes of keys and values per position of each layer; 0 for one that caches none."""
        return [0 if shape is None else shape.bytes_per_token for shape in self.caches.shapes]

    @property
    def copies_of_kv(self) -> int:
        """Copies of a layer's keys and values that attention over trees makes, beside those of `GrowingBlocks`."""
        groups = query_groups(self.config)
        return 0 if self._executor is not self._model_code or groups == self._model_code.query_groups else groups

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence tokens, as `generate` sees them; none outside of the vocabulary, as they never come."""
        eos: Any = self.model.generation_config.eos_token_id
        eos = getattr(self.config, "eos_token_id", None) if eos is None else eos
        given = eos if isinstance(eos, list | tuple) else [eos]
        return frozenset(int(one) for one in given if one in range(self.vocab_size))

    @property
    def generation_settings(self) -> dict[str, Any]:
        """Generation settings that came with the model; see `drafter.requests`."""
        return self.model.generation_config.to_dict()  # type: ignore[no-any-return]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the frozen token embeddings `[..., d]` of `tokens` `[...]`."""
        return self._embedding(tokens)  # type: ignore[no-any-return]

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the frozen LM head's logits `[..., V]` of `hidden` `[..., d]`."""
        weight = self._head.weight
        assert isinstance(weight, Tensor)
        logits: Tensor = self._head(hidden.to(weight.device)).to(hidden.device)
        self._model_code.forget_head_input()
        return logits

    @property
    def lm_head_weight(self) -> Tensor:
        """`[V, d]` weight of the frozen LM head."""
        return _whole(self._head.weight)

    @property
    def lm_head_bias(self) -> Tensor | None:
        """`[V]` bias of the frozen LM head, if it has one."""
        bias: Tensor | None = getattr(self._head, "bias", None)
        return None if bias is None else _whole(bias)

    @property
    def executor_name(self) -> str:
        """Name of the class that runs forwards."""
        return type(self._executor).__name__

    def leave_native(self) -> None:
        """Switch to the model's own code, the only executor that can be compiled."""
        self._executor = self._model_code
        restore(self.model)

    def compile(self) -> None:
        """Switch to the model's own code and compile it; raise `LoadError` for a model with recurrent layers."""
        if self.caches.states:
            raise LoadError(f"{self.name} has recurrent layers and cannot be compiled: leave compile out")
        self.leave_native()
        self._model_code.compile()

    def allow_packing(self) -> bool:
        """Prepare `verify` for packed trees; return False for a model with attention of its own."""
        if self._executor is not self._model_code or self._model_code.packs:
            return True
        if self.config._attn_implementation == "sdpa" and self._text_side._can_set_attn_implementation():
            for groups in sorted({query_groups(self.config), 1}, reverse=True):
                if attention_agrees(self, partial(self._attend, TREE_ATTENTION, groups)):
                    self._read_in_parts()
                    return True
                self._attend("sdpa", 1)
        return bool(self.config._attn_implementation == TREE_ATTENTION)

    def _read_in_parts(self) -> None:
        """Read committed positions to each row's own length, if a kernel here gives the same numbers."""
        attend, code = prefix_attention_on(self.device, self.dtype), self._model_code
        if attend is None or not code.whole or len(self.devices) > 1 or None in self.caches.shapes:
            return
        if not attention_agrees(self, partial(setattr, code, "prefix_attention", attend), LONG):
            _log.warning("%s reads all rows to one length, as flash attention gives other numbers", self.name)
            code.prefix_attention = None

    @property
    def reads_to_length(self) -> bool:
        """True if all layers read each row's committed positions to their end, whatever `TreeNodes.kv_length` is.

        Holds for a cache whose blocks are `in_order`.
        """
        code = self._model_code
        return self._executor is code and code.prefix_attention is not None and len(code.whole) == self.num_layers

    @property
    def _text_side(self) -> Any:
        """What shares its attention with the decoder: a vision tower beside it keeps its own."""
        return self.model if self.model.config is self.config else self.decoder

    def _attend(self, implementation: str, groups: int) -> None:
        """Select an attention of transformers, with masks for `groups` query heads per KV head."""
        self._text_side.set_attn_implementation(implementation)
        self._model_code.query_groups, self._model_code.packs = groups, implementation == TREE_ATTENTION

    def new_cache(
        self, slots: int, length: int, memory: int | None = None, *, layers: int | None = None
    ) -> TargetCache:
        """Allocate a cache for `slots` rows of up to `length` positions.

        Args:
            memory: Largest size in bytes. If all rows of full length need more, rows take blocks as they grow.
            layers: For early exit: forwards with this cache run only so many first layers.

        Raises:
            LoadError: A device has no room for it, or `memory` does not hold one row.
        """
        return self.caches.make(slots, length, self.device, memory, layers)

    def first_layers(self, cache: TargetCache, count: int) -> TargetCache:
        """Return a view of a cache with which a forward runs only the first layers, none of them recurrent."""
        kv = cache.layers[0]
        assert isinstance(kv, KVCache)
        return TargetCache(cache.blocks, [kv.first(count)], count)

    def forward(self, cache: TargetCache, nodes: PromptNodes | TreeNodes) -> tuple[Tensor | None, Tensor]:
        """Run nodes by the present executor, and features by the model's own code; see `Executor.forward`."""
        seen = isinstance(nodes, PromptNodes) and nodes.features is not None
        return (self._model_code if seen else self._executor).forward(cache, nodes)

    def prefill(
        self,
        cache: TargetCache,
        slot: int,
        prompts: Sequence[Tensor],
        starts: Sequence[int] = (0,),
        hidden_layers: tuple[int, ...] = (LM_HEAD_INPUT,),
        *,
        features: Features | None = None,
        shift: Tensor | None = None,
    ) -> Tensor:
        """Run prompts `[P]`, or chunks that begin at `starts`, into slots `slot` and following in one forward.

        Several only after `allow_packing` returned True. Returns hidden states `[ΣP, K · d]`; see `DecoderLayers.take`.

        Args:
            features: Of the only chunk, where its prompt has images.
            shift: As in `Nodes`.
        """
        nodes = prompt_nodes(slot, prompts, starts, hidden_layers, features=features, shift=shift)
        return self.forward(cache, nodes)[1]

    def prefill_last(
        self,
        cache: TargetCache,
        slot: int,
        prompt: Tensor,
        start: int = 0,
        hidden_layers: tuple[int, ...] = (LM_HEAD_INPUT,),
        keep: int = 1,
        *,
        features: Features | None = None,
        shift: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a chunk of a prompt; return logits `[keep, V]` after its last tokens, and hidden states `[P, K · d]`."""
        nodes = prompt_nodes(slot, [prompt], [start], hidden_layers, keep, features=features, shift=shift)
        logits, hidden = self.forward(cache, nodes)
        assert logits is not None
        return logits, hidden

    def verify(self, cache: TargetCache, nodes: TreeNodes) -> tuple[Tensor, Tensor]:
        """Run tree nodes of slots `0..B-1`; return logits `[B, N, V]` and hidden states `[B, N, K · d]` by node id.

        With a `packing` only after `allow_packing` returned True.
        """
        logits, hidden = self.forward(cache, nodes)
        assert logits is not None
        return logits, hidden

    @torch.no_grad()
    def read_early(self, tokens: Tensor, layers: int) -> Tensor:
        """Run only the first layers and the final norm over texts `[B, L]`, padded on the right; return `[B, L, d]`."""
        return self._model_code.read_early(tokens, layers)


def _whole(tensor: Any) -> Tensor:
    """Return a tensor put together of all processes' parts, if each of several has one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
