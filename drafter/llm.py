"""`SpeculativeLM`: load a target model and a drafter, and generate."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, overload

import torch
from transformers.utils import get_json_schema

from drafter.acceptance.contract import Verifier, make_verifier
from drafter.acceptance.settings import VerifierSettings, verifier_settings
from drafter.devices import in_passing_thread
from drafter.drafters.contract import Drafter, choices_of
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.config import EngineConfig, engine_config
from drafter.engine.engine import Engine
from drafter.engine.engine_thread import EngineThread
from drafter.engine.handle import Handle
from drafter.errors import LoadError, RequestError, shown
from drafter.images.loading import Eyes
from drafter.images.messages import take_images
from drafter.images.opening import ImageLimits
from drafter.images.processor import ImageProcessor
from drafter.many import Completed, Sampling, each_with_settings, in_order, make_requests, with_settings
from drafter.parts.learning import LearningStart, RowTap
from drafter.prompt import Prompt as TokenPrompt
from drafter.prompt_kinds import as_chat, each_prompt, encode_prompt
from drafter.ranks.leader import load_on_ranks
from drafter.requests import Generation, GenerationRule, Request, described
from drafter.target_model.model import BaseModel
from drafter.target_model.new_weights import Weights, match_weights
from drafter.text.conversation import Conversation, Messages
from drafter.text.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Messages | Conversation | TokenPrompt


class SpeculativeLM:
    """A target model with a drafter, decoding in a thread of its own.

    Example (`docs/python.md` has more)::

        lm = SpeculativeLM.from_pretrained()
        print(lm.chat("Tom has 3 boxes of 12 pens. How many pens?", max_new_tokens=100)[0].text)

    Args:
        tokenizer: The target model's.
        verifier: Decides which draft tokens are accepted; by default the exact one.
        samples: Receives finished rows, for a learner.
        drafter_name: Key of the step times that are kept between processes; None measures them in each.
        processor: Makes prompts of messages with images, if the target model reads such.
        brought: Draft tokens of the largest draft that `Handle.draft` may bring.
    """

    def __init__(
        self,
        base: BaseModel,
        drafter: Drafter,
        tokenizer: Any,
        config: EngineConfig | None = None,
        *,
        verifier: Verifier | None = None,
        samples: RowTap | None = None,
        drafter_name: str | None = None,
        processor: ImageProcessor | None = None,
        brought: int = 0,
    ) -> None:
        self.base, self.tokenizer, self.samples, self.processor = base, tokenizer, samples, processor
        more: dict[str, Any] = {"verifier": verifier, "tap": samples, "drafter_name": drafter_name, "brought": brought}
        self.engine = in_passing_thread(lambda: Engine(base, drafter, tokenizer, config, **more))
        self._arguments: dict[str, Any] | None = None
        self._thread = EngineThread(self.engine)
        weakref.finalize(self, self._thread.leave)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        drafter: str | Path = "auto",
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        device_map: str | dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        generation_config: GenerationRule = "auto",
        adapter: str | Path | None = None,
        dequantize: bool = False,
        isolated: bool = False,
        config: EngineConfig | Mapping[str, Any] | None = None,
        verifier: VerifierSettings | Mapping[str, Any] | str | None = None,
        learning: LearningStart | None = None,
        brought: int = 0,
        on_stage: Callable[[str], None] | None = None,
        **engine: Any,
    ) -> SpeculativeLM:
        """Load a target model, its tokeniser and a drafter.

        Args:
            model: Hub id, folder or GGUF file of the target model; None is the embedded demonstration model.
            drafter: `none` (plain decoding), `ngram`, `memory`, `cacheback`, `cacheback:TABLE` (of a corpus),
                `exit:N` (the target model's first N layers), a draft head's folder or hub id, `ctc` (the embedded
                head), `model:` and a draft model's folder or hub id, several of them joined by `+`, `long:N:DRAFTER`
                (N tokens, continued by n-grams), `stack:LOWER>model:A` (levels of draft models), or `auto`: the fastest
                of the head that ships with the project for this target model, alone and merged with `cacheback`, of
                `cacheback` and of `memory`. `auto:A,B` chooses among these.
            dtype: `auto` is bf16 on a GPU and fp32 on a CPU.
            device: `auto` is the first GPU, or the CPU.
            device_map: As in transformers, for a model larger than one GPU.
            trust_remote_code: Run modeling code that comes with the weights.
            generation_config: `ignore` leaves out the sampling settings of the model's `generation_config.json`.
            adapter: A LoRA adapter that is merged into the target model's weights: folder or hub id.
            dequantize: Load quantised weights as floating-point numbers of `dtype`. Needed where activations are
                quantised, too.
            isolated: Never draft from another request's text; response times would leak it.
            verifier: Which draft tokens become output, by its name or its settings; by default those that plain
                decoding would give.
            learning: Initial state of a head that learns from the rows. `samples` then yields these, and
                `ChangingHead.offer` takes versions of the head. The drafter is `auto` or this head.
            brought: Draft tokens of the largest draft that `Handle.draft` may bring. Rows with one are not drafted for.
            on_stage: Called with a message before each slow part of the start; by default printed on a terminal, and
                logged at level INFO elsewhere.
            engine: Fields of `EngineConfig` to change, such as `max_num_seqs=4`.

        Raises:
            LoadError: Something cannot be found, read or used.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("cls", "engine")} | engine
        name = model if model is not None else EMBEDDED_BASE
        if not isinstance(name, str | Path):
            raise LoadError(f"model must be a folder or a hub id, not {shown(model)}")
        chosen, decides = engine_config(config, engine), make_verifier(verifier_settings(verifier))

        def load_both() -> tuple[BaseModel, Drafter, ImageProcessor | None]:
            eyes = Eyes()
            base = load_on_ranks(
                chosen.tensor_parallel_size,
                name,
                dtype=dtype,
                device=device,
                device_map=device_map,
                trust_remote_code=trust_remote_code,
                generation_config=generation_config,
                adapter=adapter,
                dequantize=dequantize,
                eyes=eyes,
                on_stage=tell,
            )
            nodes = useful_nodes(base.device) if chosen.num_draft_tokens == "auto" else chosen.num_draft_tokens
            load = load_drafter if learning is None else learning.drafter
            return base, load(str(drafter), base, nodes, isolated=isolated), eyes.processor

        if learning is not None and not decides.lossless:
            raise LoadError(
                f"a head learns from what its target model says itself, and the verifier {decides.name} lets other "
                "tokens pass: use exact, or do without learning"
            )
        tell = on_stage or _tell
        tell(f"loading {model or 'the embedded model'}")
        base, loaded, processor = in_passing_thread(load_both)
        if not all(one.drafts for one in choices_of(loaded).values()) and chosen.num_draft_tokens != "auto":
            raise LoadError(
                "a head that starts from nothing is drafted with once that pays: leave num_draft_tokens at auto"
            )
        if line := described(base.generation_settings, str(name)):
            logger.warning(line)
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        samples = None if learning is None else learning.tap()
        if chosen.compile:
            tell("compiling the model")
        elif chosen.num_draft_tokens == "auto" and loaded.spec.max_nodes:
            tell("timing decode steps, once for each machine and model")
        kept_by = None if learning is not None else str(drafter)
        more: dict[str, Any] = {"verifier": decides, "samples": samples, "processor": processor, "brought": brought}
        lm = cls(base, loaded, tokenizer, chosen, drafter_name=kept_by, **more)
        lm._arguments = arguments
        return lm

    def __reduce__(self) -> Any:
        """Pickle the arguments of `from_pretrained`: unpickling, as in a Ray actor, loads the model."""
        if self._arguments is None:
            raise TypeError(
                "a SpeculativeLM of a loaded model, or with new weights, cannot be pickled: make it by from_pretrained"
            )
        return partial(SpeculativeLM.from_pretrained, **self._arguments), ()

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a request, prompt and output together."""
        return self.engine.max_length

    @overload
    def encode(
        self, prompt: str | Sequence[int], *, special_tokens: bool = False, now: datetime | None = None
    ) -> list[int]: ...

    @overload
    def encode(
        self,
        prompt: Prompt,
        *,
        images: Sequence[Any] = (),
        limits: ImageLimits | None = None,
        special_tokens: bool = False,
        now: datetime | None = None,
    ) -> list[int] | TokenPrompt: ...

    def encode(
        self,
        prompt: Prompt,
        *,
        images: Sequence[Any] = (),
        limits: ImageLimits | None = None,
        special_tokens: bool = False,
        now: datetime | None = None,
    ) -> list[int] | TokenPrompt:
        """Tokenise a text as it is, or a chat by the chat template, which gets messages, or all of a `Conversation`.

        Token ids stay as they are. A chat with images becomes a prompt with these.

        Args:
            images: Those of the parts `{"type": "image"}` without one, in order: paths, `data:` URIs, files' bytes,
                images of Pillow or arrays. If there are no such parts, the user's first message begins with them. Of a
                text, those of the placeholders that the model's processor reads there.
            limits: Limits on the images, if not those of `ImageLimits`.
            special_tokens: Parse special tokens in the text of messages; by default they are plain text there. In a
                prompt that is a text they are always parsed.
            now: Time for chat templates that read the clock; by default the present.

        Raises:
            RequestError: The prompt is too long, or neither a text, messages nor token ids, there is no chat template,
                the tokeniser cannot take a special token's text in a message as text, or an image cannot be read.
        """
        processor = self.base.blind if self.processor is None or self.base.sight is None else self.processor
        settings: dict[str, Any] = {"special_tokens": special_tokens, "max_length": self.max_length, "now": now}
        return encode_prompt(prompt, self.tokenizer, processor, images, limits, **settings)

    def submit(self, request: Request, *, stream: bool = False) -> Handle:
        """Queue a request; with `stream` the handle is iterated over for its tokens. Safe from any thread.

        Raises:
            RequestError: The request cannot be generated.
            QueueFullError: Too many requests are waiting.
            EngineError: The engine has failed or is closed.
        """
        self._thread.refuse_fork()
        if not isinstance(request, Request):
            raise RequestError(f"submit takes a Request, not {shown(request)}: generate and stream take prompts")
        handle = self.engine.submit(request, stream=stream)
        self._thread.wake()
        return handle

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Iterable[Sampling] | None = None,
        *,
        n: int = 1,
        prompt_logprobs: int | None = None,
        special_tokens: bool = False,
        on_error: Literal["return", "raise"] = "return",
        use_tqdm: bool | None = None,
        **settings: Any,
    ) -> list[Generation]:
        """Generate for one prompt or many, and wait for all. If the call is interrupted, its requests are cancelled.

        Args:
            prompts: A text, which is continued as it is, token ids, messages, or a `Conversation`; or many of these, in
                a list, an iterator, an array or a column.
            sampling: `SamplingParams` or a mapping of its fields, or a sequence of these, one for each prompt. Unset
                fields come from the model's `generation_config.json`, or else are greedy decoding of up to 256 tokens.
            n: Samples of each prompt, next to each other in the result. Their seeds follow from that of `sampling` and
                from the indices of prompt and sample.
            prompt_logprobs: Return the log-probability of each token of the prompts, too, with so many of the most
                probable ones there, 0 to 20. Such a prompt is read by itself; its first sample has them.
            special_tokens: As in `encode`.
            on_error: For a prompt that cannot be generated, `return` a result with an `error`, or `raise`.
            use_tqdm: Show a progress bar; by default for many prompts in a terminal or a notebook.
            settings: Fields of `SamplingParams` to change, such as `max_new_tokens=100`.

        Raises:
            RequestError: A setting cannot be used; or a prompt, if `on_error` is `raise`.
            EngineError: The engine has failed or is closed.
        """
        encode = partial(self.encode, special_tokens=special_tokens)
        made = self._as_completed(encode, prompts, sampling, n, prompt_logprobs, settings)
        return in_order(made, prompts, n, on_error=on_error, use_tqdm=use_tqdm)

    def chat(
        self,
        conversations: str | Messages | Iterable[str | Messages],
        sampling: Sampling | Iterable[Sampling] | None = None,
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        n: int = 1,
        prompt_logprobs: int | None = None,
        special_tokens: bool = False,
        on_error: Literal["return", "raise"] = "return",
        use_tqdm: bool | None = None,
        **settings: Any,
    ) -> list[Generation]:
        """Answer one conversation or many: messages, or a text as the user's message. Otherwise as `generate`.

        A message may have images: parts such as `{"type": "image", "image": image}`, with an image of Pillow, a path, a
        `data:` URI, a file's bytes or an array, and OpenAI's `image_url`.

        Args:
            tools: JSON schemas, or functions with types and a docstring; this and the next four are those of a
                `Conversation`, for all conversations.
        """
        schemas = tools and [get_json_schema(one) if callable(one) else one for one in tools]
        asked = (schemas, documents, chat_template_kwargs, add_generation_prompt, continue_final_message)

        def encode(one: Any) -> list[int] | TokenPrompt:
            said, sources = (one, []) if isinstance(one, Conversation) else take_images(one)
            return self.encode(as_chat(said, *asked), images=sources, special_tokens=special_tokens)

        made = self._as_completed(encode, conversations, sampling, n, prompt_logprobs, settings)
        return in_order(made, conversations, n, on_error=on_error, use_tqdm=use_tqdm)

    def as_completed(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Iterable[Sampling] | None = None,
        *,
        n: int = 1,
        prompt_logprobs: int | None = None,
        special_tokens: bool = False,
        **settings: Any,
    ) -> Completed:
        """Yield what `generate` returns as it comes, by `for` or `async for`.

        `request_id` is the prompt's index (`3`, or `3#1` of several).
        """
        encode = partial(self.encode, special_tokens=special_tokens)
        return self._as_completed(encode, prompts, sampling, n, prompt_logprobs, settings)

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, special_tokens: bool = False, **settings: Any
    ) -> Handle:
        """Start one prompt: `for` or `async for` yields its tokens, `.result()` or `await` returns its result.

        It raises what `encode` and `submit` raise.
        """
        ids = self.encode(prompt, special_tokens=special_tokens)
        return self.submit(Request(ids, with_settings(sampling, settings)), stream=True)

    def _as_completed(
        self,
        encode: Callable[[Any], list[int] | TokenPrompt],
        prompts: object,
        sampling: Sampling | Iterable[Sampling] | None,
        n: int,
        prompt_logprobs: int | None,
        settings: Mapping[str, Any],
    ) -> Completed:
        chosen = each_with_settings(sampling, settings)
        if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
            raise RequestError(f"n must be an integer of at least 1, not {shown(n)}")
        requests = make_requests(encode, each_prompt(prompts), chosen, int(n), self.max_length, prompt_logprobs)
        return Completed(self.submit, requests, self.engine.config.max_queue)

    def update_weights(self, weights: Weights) -> int:
        """Replace the target model's weights in place, as a trainer does after each of its steps.

        Results have the tokens that a model loaded with the new weights would give. What was computed with the old ones
        goes: kept rows, images' features, and the weights' copies in layouts of their own. The drafter stays.

        Args:
            weights: The trained model's `named_parameters()` or `state_dict()`, or the pairs of a checkpoint, on any
                device and in any floating dtype. All are looked at before one is copied.

        Returns:
            The version of the weights, which results have as `weights_version`: 1 after the first call.

        Raises:
            LoadError: A name or a shape is not the model's, a parameter is missing, or a number is not finite. Nothing
                has changed then.
            EngineError: Requests are under way, or the engine has failed or is closed.
        """
        version = self._thread.update_weights(match_weights(self.base.name, self.base.model, weights))
        self._arguments = None
        return version

    def close(self) -> None:
        """Stop the thread; unfinished requests end with an error. Called automatically at exit.

        A model that is no longer used is freed without it, once its requests have ended.
        """
        self._thread.close()

    def __enter__(self) -> SpeculativeLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tell(stage: str) -> None:
    """Say what the start does, which may take a minute, to whoever waits for it: at a terminal or in a notebook."""
    if (sys.stderr.isatty() or hasattr(sys, "ps1")) and not logger.isEnabledFor(logging.INFO):
        print(f"{stage} …", file=sys.stderr, flush=True)
    else:
        logger.info(stage)
