"""The base: any decoder-only softmax-attention causal LM of transformers, its own modeling code unforked.

Three things make tree decoding out of an ordinary forward: our `KVCache`, a 4-D mask (a dictionary of masks for
models that mix kinds of attention) and explicit position ids. `_check` proves at load that the model heeds all three.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafter import devices
from drafter.errors import LoadError
from drafter.base.kv_cache import KVCache, LayerShape
from drafter.base.masks import additive, tree_attention_mask
from drafter.memory import free_bytes
from drafter.base.packing import PACKED_ATTENTION, Packing
from drafter.base.executors.prepacked import prepack, product_of

_ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
_COMPILED_VARIANTS = 64
_FOREIGN = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)
"""What the code of a model may raise when it is run in a way that it does not know."""


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """`auto` is the first GPU where there is one, the CPU otherwise.

    Raises:
        LoadError: There is no such device here.
    """
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise LoadError(f"device {device!r} is not available here: {_first_line(error)}") from error


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is bf16 on a GPU and fp32 on a CPU, where bf16 is rarely faster.

    Raises:
        LoadError: Not the name of a floating-point dtype.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise LoadError(f"dtype {dtype!r} is unknown: use auto, float32, bfloat16 or float16")
    return found


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _refuse_unsupported(name: str, config: Any) -> None:
    """Raise `LoadError` for architectures that a KV cache with a tree mask cannot decode, before weights are read."""
    if getattr(config, "is_encoder_decoder", False):
        raise LoadError(
            f"{name}: {config.model_type} is an encoder-decoder model; only decoder-only models can be a base"
        )
    text = config.get_text_config(decoder=True)
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_KINDS)
    if foreign:
        raise LoadError(
            f"{name}: {config.model_type} has {', '.join(foreign)} layers, whose state cannot be rolled back to an "
            "accepted path; only softmax-attention models can be a base"
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not getattr(config, "auto_map", None):
        raise LoadError(f"{name}: {config.model_type} is not a causal language model that transformers knows")


@dataclass(frozen=True)
class _Nodes:
    """What a forward reads; see `BaseModel.verify`."""

    tokens: Tensor
    lengths: Tensor
    depths: Tensor
    ancestors: Tensor
    kv_length: int
    packing: Packing | None = None


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
        fingerprint: 16 hex digits that tell bases apart, the same in whichever precision one is loaded.

    Raises:
        LoadError: The model cannot be decoded by trees; the message names it and the reason.
    """

    def __init__(self, model: Any, name: str = "") -> None:
        self.name = name or model.config.name_or_path or type(model).__name__
        _refuse_unsupported(self.name, model.config)
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
        self.decoder: nn.Module = _decoder(model)
        # Read once: transformers' configurations are slow to ask.
        self.dtype: torch.dtype = model.dtype
        self.max_positions = _max_positions(self.config)
        self._kinds = _attention_kinds(self.config)
        takes = inspect.signature(model.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._head_input: Tensor | None = None
        self._head.register_forward_pre_hook(self._keep_head_input)
        self._verify = self._forward
        prepack(self.model)
        self._check()
        self.fingerprint = self._fingerprint()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        device_map: str | dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> BaseModel:
        """Load a base from the hub or a local folder; safetensors only.

        Args:
            name_or_path: Hub id or folder.
            dtype: `auto`, or a floating-point dtype or its name.
            device: `auto`, or a torch device. Not used with `device_map`.
            device_map: As in transformers, for a base larger than one GPU.
            trust_remote_code: Run modeling code that comes with the weights.

        Raises:
            LoadError: Not found, not readable, or not a model that can be decoded by trees.
        """
        name = str(name_or_path)
        target = pick_device(device)
        kwargs: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(name, **kwargs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(
                f"no base model at {name!r}: {_first_line(error)} (give a folder with config.json, or a hub id)"
            ) from error
        _refuse_unsupported(name, config)
        kwargs |= {"dtype": pick_dtype(dtype, target), "use_safetensors": True}
        if device_map is not None:
            kwargs["device_map"] = device_map
        # The fused kernels cannot cap attention scores.
        if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None):
            kwargs["attn_implementation"] = "eager"
        try:
            try:
                model = AutoModelForCausalLM.from_pretrained(name, **kwargs)
            except ValueError as error:
                if "scaled_dot_product_attention" not in str(error):
                    raise
                model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager", **kwargs)
            if device_map is None:
                model = model.to(target)
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise LoadError(f"base model {name!r} cannot be loaded: {_first_line(error)}") from error
        except Exception as error:  # safetensors raises a class of its own for a damaged file
            if type(error).__module__.startswith("safetensors") or "Safetensor" in type(error).__name__:
                raise LoadError(f"base model {name!r} has damaged weights: {_first_line(error)}") from error
            raise
        return cls(model, name)

    # ---- what it is

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

    def _fingerprint(self) -> str:
        """Of shape, a sample of the embedding, and every norm and bias.

        Rounded to bf16 and taken from tensors that quantisation leaves alone, so that a base has one fingerprint in
        whichever precision it is loaded.
        """
        digest = hashlib.sha256()
        shape = [self.config.model_type, self.config.num_hidden_layers, self.hidden_size, self.vocab_size]
        digest.update(repr(shape).encode())
        flat = self._embedding.weight.flatten()  # type: ignore[operator]
        # Clamped, because the last of these is rounded up where the embedding is large.
        places = torch.linspace(0, flat.numel() - 1, 4096).long().clamp_max(flat.numel() - 1)
        sample = flat[places.to(flat.device)]
        vectors = [p.detach().flatten() for _, p in sorted(self.model.named_parameters()) if p.dim() == 1]
        for tensor in [sample, *vectors]:
            digest.update(tensor.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

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
        """Compile the forward of `verify` for this machine: the same sums in fewer operations.

        The first call for one row and for several, of one node and of several, compiles for a while; a compiler's
        error comes from there.
        """
        # Each size of engine in a process has variants of its own; past the limit they would run uncompiled.
        options: dict[str, Any] = {}
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            options["recompile_limit"] = _COMPILED_VARIANTS
        else:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILED_VARIANTS)
        self._verify = torch.compile(self._forward, dynamic=True, **options)

    def allow_packing(self) -> bool:
        """Make `verify` ready for packed trees, and say whether it is: some models have attention of their own."""
        if self.model.config._attn_implementation == "sdpa" and self.model._can_set_attn_implementation():
            self.model.set_attn_implementation(PACKED_ATTENTION)
            if not self._packs():
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
            free = free_bytes(device)
            if free is not None and size > free:
                raise LoadError(
                    f"a KV cache of {slots:,} slots of {length:,} positions takes {size / 2**30:,.1f} GiB beside "
                    f"{self.name}, and {device} has {free / 2**30:,.1f} GiB left: lower slots or max_length"
                )
        return KVCache(self._layer_shapes, slots, length, self.device)

    def prefill(self, cache: KVCache, slot: int, prompts: Sequence[Tensor], starts: Sequence[int] = (0,)) -> Tensor:
        """Run prompts, or pieces of them, into slots in one forward; return their hidden states `[ΣP, d]`.

        Args:
            cache: Holds the committed positions on which each prompt follows.
            slot: Where the first one goes to; the others follow it.
            prompts: Each `[P]`, at least one token; several only where `allow_packing` says so.
            starts: Position of each one's first token.
        """
        # The decoder without its LM head: these logits are never needed.
        return self.decoder(**self._prompt_inputs(cache, slot, prompts, starts)).last_hidden_state[0]  # type: ignore[no-any-return]

    def prefill_last(self, cache: KVCache, slot: int, prompt: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """The same for one prompt's last piece; return the logits `[1, V]` after it, too, before the hidden states."""
        found: list[Tensor] = []
        # The model hands out what its LM head makes of these, and may do something to the logits after that.
        hook = self.decoder.register_forward_hook(lambda *call: found.append(call[2].last_hidden_state[0]))
        try:
            logits = self.model(**self._prompt_inputs(cache, slot, [prompt], [start]), **self._last_logits).logits
        finally:
            hook.remove()
            self._head_input = None
        return logits[0, -1:], found[0]

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
        return self._inputs(cache, slot, _Nodes(tokens, lengths, depths, ancestors, kv_length, packing))

    def verify(
        self,
        cache: KVCache,
        tokens: Tensor,
        lengths: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        kv_length: int,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One forward over tree nodes. Rows are slots `0..B-1`; the nodes' KV goes behind the committed positions.

        Args:
            cache: Holds `lengths` committed positions of each row.
            tokens: `[B, N]` node tokens; any valid id in padding.
            lengths: `[B]`.
            depths: `[B, N]`.
            ancestors: `[B, N, N]` bool.
            kv_length: Cache positions to read; at least every row's length + N.
            packing: Of the nodes that are not padding, if only these are to be computed; where `allow_packing` says so.

        Returns:
            Logits `[B, N, V]` and hidden states `[B, N, d]`, both by node id.
        """
        # A copy, because what is compiled is of one layout, and a tree's leading part has another.
        depths = depths.clone(memory_format=torch.contiguous_format)
        return self._verify(cache, _Nodes(tokens, lengths, depths, ancestors, kv_length, packing))

    def _forward(self, cache: KVCache, nodes: _Nodes) -> tuple[Tensor, Tensor]:
        inputs, packing = self._inputs(cache, 0, nodes), nodes.packing
        logits = self.model(**inputs).logits
        hidden, self._head_input = self._head_input, None
        assert hidden is not None
        return (logits, hidden) if packing is None else (packing.unpack(logits), packing.unpack(hidden))

    def _inputs(self, cache: KVCache, slot: int, nodes: _Nodes) -> dict[str, Any]:
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

    # ---- the proof at load

    @torch.inference_mode()
    def _check(self) -> None:
        """Run a few tokens the model's own way and ours, and refuse the model if they differ.

        Also learns what each layer caches. Our way puts a decoy node before the true continuation, so that a
        model that ignores the mask or the positions is found out.
        """
        ids = torch.arange(1, 7, device=self.device) * 7919 % self.vocab_size
        try:
            plain = self.model(input_ids=ids[None], past_key_values=DynamicCache(config=self.config), use_cache=True)
            self._layer_shapes = [_layer_shape(layer) for layer in plain.past_key_values.layers]
            cache = self.new_cache(2, 16)
            first, hidden = self.prefill_last(cache, 0, ids[:4])
            # Root ids[4], a decoy child, and the true child ids[5].
            tokens = torch.stack([ids[4], ids[0], ids[5]])[None]
            parents = torch.tensor([[True, False, False], [True, True, False], [True, False, True]], device=self.device)
            lengths = torch.tensor([4], device=self.device)
            depths = torch.tensor([[0, 1, 1]], device=self.device)
            logits, node_hidden = self.verify(cache, tokens, lengths, depths, parents[None], 8)
        except _FOREIGN as error:
            raise LoadError(
                f"{self.name}: {self.model.config.model_type} does not run with a tree mask and a slot cache "
                f"({type(error).__name__}: {_first_line(error)}); it cannot be a base"
            ) from error
        if not self._alike(torch.cat([first, logits[0, [0, 2]]]), plain.logits[0, 3:]):
            raise LoadError(
                f"{self.name}: {self.model.config.model_type} gives other logits with a tree mask, explicit positions "
                "and a slot cache than by itself; it cannot be a base (state-space and linear attention, ALiBi and "
                "bidirectional models cannot)"
            )
        if hidden.shape[-1] != node_hidden.shape[-1]:
            raise LoadError(f"{self.name}: the decoder's output is not the LM head's input; it cannot be a base")

    def _alike(self, logits: Tensor, others: Tensor) -> bool:
        others = others.float()
        scale = others.abs().amax().clamp_min(1e-6)
        return bool(((logits.float() - others).abs().amax() / scale) < (1e-3 if self.dtype == torch.float32 else 0.1))

    @torch.inference_mode()
    def _packs(self) -> bool:
        """Whether the model computes two trees, and two prompts, of three and two tokens, packed as it does apart."""
        tokens = torch.arange(1, 7, device=self.device).view(2, 3) * 7919 % self.vocab_size
        lengths = torch.tensor([0, 1], device=self.device)
        depths = torch.tensor([[0, 1, 1], [0, 1, 1]], device=self.device)
        ancestors = torch.eye(3, dtype=torch.bool, device=self.device).repeat(2, 1, 1)
        ancestors[:, :, 0] = True
        real = torch.tensor([[True, True, True], [True, True, False]], device=self.device)
        cache = self.new_cache(2, 8)
        try:
            # The packed one first, so that it cannot find what the other one has written.
            packed, padded = (
                self._forward(cache, _Nodes(tokens, lengths, depths, ancestors, 4, packing))
                for packing in (Packing.of(real), None)
            )
            prompts, starts = [tokens[0], tokens[1, :2]], [0, 1]
            together = self.prefill(cache, 0, prompts, starts)
            apart = torch.cat(
                [self.prefill(cache, row, prompts[row : row + 1], starts[row : row + 1]) for row in (0, 1)]
            )
        except _FOREIGN:
            return False
        same = [(packed[0][real], padded[0][real]), (packed[1][real], padded[1][real]), (together, apart)]
        return all(self._alike(ours, theirs) for ours, theirs in same)


def _decoder(model: Any) -> nn.Module:
    decoder: nn.Module = model.get_decoder()
    # Some models do not know their own: they name the model itself.
    if decoder is model and isinstance(inner := getattr(model, "model", None), nn.Module):
        return inner
    return decoder


def _max_positions(config: Any) -> int | None:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        # Past this the model scales all positions of a batch when one text is so long: texts would hang on each other.
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return int(original)
    for field in ("max_position_embeddings", "n_positions", "seq_length"):
        if getattr(config, field, None):
            return int(getattr(config, field))
    return None


def _attention_kinds(config: Any) -> dict[str, tuple[int | None, int | None]]:
    """Window and chunk of each kind of attention in the model, by transformers' name of the kind."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = {"sliding_attention" if sliding else "full_attention"}
    return {
        kind: (
            config.sliding_window if kind == "sliding_attention" else None,
            config.attention_chunk_size if kind == "chunked_attention" else None,
        )
        for kind in sorted(kinds)
    }


def _layer_shape(layer: Any) -> LayerShape | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)


def load_tokenizer(name_or_path: str | Path, *, trust_remote_code: bool = False, local_files_only: bool = False) -> Any:
    """Load the tokeniser that belongs to a base.

    Args:
        name_or_path: Hub id or folder of the base.
        trust_remote_code: Run code that comes with it.
        local_files_only: Download nothing.

    Raises:
        LoadError: There is none to load.
    """
    try:
        return AutoTokenizer.from_pretrained(
            str(name_or_path), trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
    except Exception as error:  # tokenizers raises bare `Exception` for a damaged file
        raise LoadError(f"no tokenizer at {str(name_or_path)!r}: {_first_line(error)}") from error
