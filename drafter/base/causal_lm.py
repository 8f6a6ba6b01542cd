"""The base: any decoder-only softmax-attention causal LM of transformers, its own modeling code unforked.

Three things make tree decoding out of an ordinary forward: our `KVCache`, a 4-D mask (a dictionary of masks for
models that mix kinds of attention) and explicit position ids. `self_check` proves at load that the model heeds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drafter import devices
from drafter.base.architecture import attention_kinds, decoder_of, max_positions, refuse_unsupported
from drafter.base.executors.compiled import compiled
from drafter.base.executors.contract import Executor, TreeNodes
from drafter.base.executors.prepacked import prepack, product_of
from drafter.base.fingerprint import fingerprint, first_fingerprint, is_of_first_scheme
from drafter.base.hidden_states import LM_HEAD_INPUT, DecoderLayers
from drafter.base.kv_cache import KVCache
from drafter.base.masks import additive, tree_attention_mask
from drafter.base.packing import PACKED_ATTENTION, Packing
from drafter.base.self_check import packs_alike, prove_tree_decoding, run_plainly
from drafter.errors import LoadError


class BaseModel:
    """A frozen base LM that verifies draft trees.

    Args:
        model: A transformers causal LM, on its device(s).
        name: Hub id or path; goes into draft heads' configuration.

    Attributes:
        decoder: The model without its LM head.
        dtype: Of the hidden states.
        max_positions: Longest sequence that it decodes as the model by itself would; None if its configuration does not
            say.
        fingerprint: Tells bases apart by all of their tensors, but not in which precision they are loaded; see
            `drafter.base.fingerprint`.

    Raises:
        LoadError: The model cannot be decoded by trees; the message names it and the reason.
    """

    def __init__(self, model: Any, name: str = "") -> None:
        self.name = name or model.config.name_or_path or type(model).__name__
        refuse_unsupported(self.name, model.config)
        if getattr(model, "_is_stateful", False):
            raise LoadError(
                f"{self.name}: {model.config.model_type} keeps a recurrent state that cannot be rolled back"
            )
        self.model = model.eval().requires_grad_(False)
        if model.device.type == "cuda":
            # It makes a plan for every new shape, which takes longer than most prompts; other kernels take masks, too.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.config = model.config.get_text_config(decoder=True)
        self._head: nn.Module = model.get_output_embeddings()
        self._embedding: nn.Module = model.get_input_embeddings()
        if self._head is None or self._embedding is None:
            raise LoadError(f"{self.name}: {model.config.model_type} has no LM head")
        self.decoder: nn.Module = decoder_of(model)
        self._layers = DecoderLayers(self.decoder, self.config.num_hidden_layers, self.name)
        # Read once: transformers' configurations are slow to ask.
        self.dtype: torch.dtype = model.dtype
        self.max_positions = max_positions(self.config)
        self._kinds = attention_kinds(self.config)
        takes = inspect.signature(model.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._head_input: Tensor | None = None
        self._head.register_forward_pre_hook(self._keep_head_input)
        self._executor: Executor = self._run_model
        prepack(self.model)
        plain = run_plainly(self)
        self._layer_shapes = plain.layer_shapes
        prove_tree_decoding(self, plain)
        self._sizes = [model.config.model_type, self.config.num_hidden_layers, self.hidden_size, self.vocab_size]
        self.fingerprint = fingerprint(self.model, self._sizes)

    # ---- what it is

    def has_fingerprint(self, given: str) -> bool:
        """Return whether `given` is this base's fingerprint, in the present scheme or in that of earlier releases."""
        if is_of_first_scheme(given):
            return given == first_fingerprint(self.model, self._embedding.weight, self._sizes)  # type: ignore[arg-type]
        return given == self.fingerprint

    @property
    def device(self) -> torch.device:
        """Where token ids go and logits come from."""
        return self._embedding.weight.device  # type: ignore[return-value]

    @property
    def devices(self) -> set[torch.device]:
        """All that it lies on."""
        return {parameter.device for parameter in self.model.parameters()}

    @property
    def hidden_size(self) -> int:
        """d, the width of the hidden states."""
        return int(self._head.weight.shape[1])  # type: ignore[index]

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        return int(self.config.vocab_size)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence, as `generate` sees them."""
        eos = self.model.generation_config.eos_token_id
        eos = self.config.eos_token_id if eos is None else eos
        return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)

    # ---- what draft heads borrow

    def embed(self, tokens: Tensor) -> Tensor:
        """Frozen token embeddings `[..., d]` of `tokens` `[...]`."""
        return self._embedding(tokens)  # type: ignore[no-any-return]

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Frozen LM head: logits `[..., V]` of `hidden` `[..., d]`."""
        logits: Tensor = self._head(hidden)
        self._head_input = None
        return logits

    def prepared_lm_head(self) -> Callable[[Tensor], Tensor]:
        """`lm_head` for weights that change no more, without gradients; see `product_of`."""
        product = product_of(self._head)
        return self.lm_head if product is self._head else product

    @property
    def lm_head_weight(self) -> Tensor:
        """`[V, d]` weight of the frozen LM head."""
        return self._head.weight  # type: ignore[return-value]

    @property
    def lm_head_bias(self) -> Tensor | None:
        """`[V]` bias of the frozen LM head, if it has one."""
        return getattr(self._head, "bias", None)

    # ---- forwards

    def compile(self) -> None:
        """Compile the forward of `verify`; see `compiled`."""
        self._executor = compiled(self._run_model)

    def allow_packing(self) -> bool:
        """Make `verify` ready for packed trees, and say whether it is: some models have attention of their own."""
        if self.model.config._attn_implementation == "sdpa" and self.model._can_set_attn_implementation():
            self.model.set_attn_implementation(PACKED_ATTENTION)
            if not packs_alike(self):
                self.model.set_attn_implementation("sdpa")
        return bool(self.model.config._attn_implementation == PACKED_ATTENTION)

    def new_cache(self, slots: int, length: int) -> KVCache:
        """A KV cache for `slots` rows of up to `length` positions.

        Raises:
            LoadError: A device has no room for it.
        """
        wanted: dict[torch.device, int] = {}
        for shape in self._layer_shapes:
            if shape is not None:
                wanted[shape.device] = wanted.get(shape.device, 0) + slots * length * shape.bytes_per_token
        for device, size in wanted.items():
            free = devices.free_bytes(device)
            if free is not None and size > free:
                raise LoadError(
                    f"a KV cache of {slots:,} slots of {length:,} positions takes {size / 2**30:,.1f} GiB beside "
                    f"{self.name}, and {device} has {free / 2**30:,.1f} GiB left: lower slots or max_length"
                )
        return KVCache(self._layer_shapes, slots, length, self.device)

    def prefill(
        self,
        cache: KVCache,
        slot: int,
        prompts: Sequence[Tensor],
        starts: Sequence[int] = (0,),
        hidden_layers: tuple[int, ...] = (LM_HEAD_INPUT,),
    ) -> Tensor:
        """Run prompts, or pieces of them, into slots in one forward; return their hidden states `[ΣP, K · d]`.

        Args:
            cache: Holds the committed positions on which each prompt follows.
            slot: Where the first one goes to; the others follow it.
            prompts: Each `[P]`, at least one token; several only where `allow_packing` says so.
            starts: Position of each one's first token.
            hidden_layers: Which K hidden states to return; see `DecoderLayers.take`.
        """
        self._layers.watch(hidden_layers)
        # The decoder without its LM head: these logits are never needed.
        last = self.decoder(**self._prompt_inputs(cache, slot, prompts, starts)).last_hidden_state
        return self._layers.take(hidden_layers, last)[0]

    def prefill_last(
        self,
        cache: KVCache,
        slot: int,
        prompt: Tensor,
        start: int = 0,
        hidden_layers: tuple[int, ...] = (LM_HEAD_INPUT,),
    ) -> tuple[Tensor, Tensor]:
        """Run the last piece of one prompt; return the logits `[1, V]` after it and its hidden states `[P, K · d]`."""
        self._layers.watch(hidden_layers)
        found: list[Tensor] = []
        # The model hands out what its LM head makes of these, and may do something to the logits after that.
        hook = self.decoder.register_forward_hook(lambda *call: found.append(call[2].last_hidden_state))
        try:
            logits = self.model(**self._prompt_inputs(cache, slot, [prompt], [start]), **self._last_logits).logits
        finally:
            hook.remove()
            self._head_input = None
        return logits[0, -1:], self._layers.take(hidden_layers, found[0])[0]

    def _prompt_inputs(
        self, cache: KVCache, slot: int, prompts: Sequence[Tensor], starts: Sequence[int]
    ) -> dict[str, Any]:
        """Of prompts as trees without branches."""
        counts = [len(prompt) for prompt in prompts]
        rows, longest, device = len(counts), max(counts), self.device
        tokens = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True)
        lengths = devices.send(torch.tensor(starts), device)
        depths = torch.arange(longest, device=device).expand(rows, -1)
        ancestors = torch.ones(longest, longest, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
        kv_length = max(start + count for start, count in zip(starts, counts, strict=True))
        packing = Packing.of_counts(counts, device) if rows > 1 else None
        return self._inputs(cache, slot, TreeNodes(tokens, lengths, depths, ancestors, kv_length, packing))

    def verify(self, cache: KVCache, nodes: TreeNodes) -> tuple[Tensor, Tensor]:
        """Run one forward over tree nodes. Rows are slots `0..B-1`; the nodes' KV goes behind the committed positions.

        Args:
            cache: Holds the committed positions of each row.
            nodes: With a `packing` only where `allow_packing` says so.

        Returns:
            Logits `[B, N, V]` and hidden states `[B, N, K · d]`, both by node id.
        """
        self._layers.watch(nodes.hidden_layers)
        # A copy, because what is compiled is of one layout, and a tree's leading part has another.
        depths = nodes.depths.clone(memory_format=torch.contiguous_format)
        return self._executor(cache, replace(nodes, depths=depths))

    def _run_model(self, cache: KVCache, nodes: TreeNodes) -> tuple[Tensor, Tensor]:
        """The `Executor` that calls the model as it is."""
        inputs, packing = self._inputs(cache, 0, nodes), nodes.packing
        logits = self.model(**inputs).logits
        head_input, self._head_input = self._head_input, None
        assert head_input is not None
        hidden = self._layers.take(nodes.hidden_layers, head_input)
        return (logits, hidden) if packing is None else (packing.unpack(logits), packing.unpack(hidden))

    def exit_early(self, cache: KVCache, nodes: TreeNodes, layers: int) -> Tensor:
        """Run only the first layers over tree nodes, and the final norm; return the LM head's input `[B, N, d]`.

        The nodes' KV of these layers goes behind the committed positions, where the next `verify` overwrites it.

        Args:
            cache: Holds the committed positions of each row.
            nodes: Without a `packing`.
            layers: How many of the first layers to run.
        """
        with self._layers.only_first(layers):
            return self.decoder(**self._inputs(cache, 0, nodes)).last_hidden_state  # type: ignore[no-any-return]

    def _inputs(self, cache: KVCache, slot: int, nodes: TreeNodes) -> dict[str, Any]:
        tokens, lengths, packing = nodes.tokens, nodes.lengths[:, None], nodes.packing
        masks = {
            kind: additive(
                tree_attention_mask(
                    nodes.lengths, nodes.depths, nodes.ancestors, nodes.kv_length, window=window, chunk=chunk
                ),
                self.dtype,
            )
            for kind, (window, chunk) in self._kinds.items()
        }
        positions = lengths + nodes.depths
        if self.max_positions is not None:
            # Nodes past the end, and those of empty slots, are never emitted; but a learned position table must not be
            # read past its end, and some models scale all positions by the largest.
            positions = positions.clamp_max(self.max_positions - 1)
        places = lengths + torch.arange(tokens.shape[1], device=tokens.device)
        inputs = {
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            "past_key_values": cache.view(slot, places, nodes.kv_length, packing),
            "use_cache": True,
        }
        if packing is None:
            return inputs | {"input_ids": tokens, "position_ids": positions}
        return inputs | {"input_ids": packing.pack(tokens), "position_ids": packing.pack(positions), "packing": packing}

    def _keep_head_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._head_input = args[0]
