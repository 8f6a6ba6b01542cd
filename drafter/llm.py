"""`SpeculativeLM`: load a target model and a drafter, and generate."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from drafter.acceptance.contract import Verifier
from drafter.acceptance.registry import make_verifier
from drafter.acceptance.settings import VerifierSettings
from drafter.devices import in_passing_thread
from drafter.drafters.contract import Drafter
from drafter.drafters.registry import load_drafter, useful_nodes
from drafter.embedded import EMBEDDED_BASE
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.sequence import Handle
from drafter.engine.tap import LearningStart, RowTap
from drafter.errors import LoadError, RequestError
from drafter.generation_defaults import GenerationRule, described
from drafter.requests import Generation, Request, SamplingParams
from drafter.target.loading import load_base
from drafter.target.model import BaseModel
from drafter.text.bounds import tokenise
from drafter.text.chat import encode_chat
from drafter.text.tokenizers import load_tokenizer, longest_token, refuse_endless

logger = logging.getLogger(__name__)

Message = dict[str, str]
Prompt = str | Sequence[Message]


class SpeculativeLM:
    """A target model with a drafter, decoding in a thread of its own.

    Example::

        from drafter import SpeculativeLM

        lm = SpeculativeLM.from_pretrained()
        print(lm.generate("Tom has 3 boxes of 12 pens. How many pens?", max_new_tokens=100)[0].text)

    Args:
        base: The target model.
        drafter: Proposes draft trees.
        tokenizer: The target model's.
        config: Sizes of the engine.
        verifier: Decides which draft tokens are accepted; by default the exact one.
        samples: Receives finished rows, for a learner.
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
    ) -> None:
        self.base, self.tokenizer, self.samples = base, tokenizer, samples
        self.engine = in_passing_thread(
            lambda: Engine(base, drafter, tokenizer, config, verifier=verifier, tap=samples)
        )
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="drafter-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # at exit Python kills daemon threads; inside a step that crashes

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
        isolated: bool = False,
        config: EngineConfig | None = None,
        verifier: VerifierSettings | None = None,
        learning: LearningStart | None = None,
        on_stage: Callable[[str], None] | None = None,
    ) -> SpeculativeLM:
        """Load a target model, its tokeniser and a drafter.

        Args:
            model: Hub id or folder of the target model; None is the embedded demonstration model.
            drafter: `none` (plain decoding), `ngram`, `memory`, `cacheback`, `exit:N`, a draft head's folder or hub id,
                `ctc` (the embedded head), `model:` and a draft model's, several of them joined by `+`,
                `long:N:DRAFTER`, `stack:LOWER>model:A`, or `auto`: the fastest of the head that ships with the project
                for this target model, `memory`, `cacheback` and `ngram`.
            dtype: `auto` is bf16 on a GPU and fp32 on a CPU.
            device: `auto` is the first GPU, or the CPU.
            device_map: As in transformers, for a model larger than one GPU.
            trust_remote_code: Run modeling code that comes with the weights.
            generation_config: `ignore` leaves out the sampling settings of the model's `generation_config.json`.
            isolated: Never draft from another request's text; response times would leak it.
            config: Sizes of the engine.
            verifier: Which draft tokens become output; by default those that plain decoding would give.
            learning: Initial state of a head that learns from the rows. `samples` then yields these, and
                `engine.drafter.offer` takes versions of the head. The drafter is `auto` or this head.
            on_stage: Called with a message before each slow part of the start; by default logged at level INFO.

        Raises:
            LoadError: Something cannot be found, read or used; the message says what.
        """
        name = model if model is not None else EMBEDDED_BASE
        chosen, decides = config or EngineConfig(), make_verifier(verifier or VerifierSettings())

        def load() -> tuple[BaseModel, Drafter]:
            base = load_base(
                name,
                dtype=dtype,
                device=device,
                device_map=device_map,
                trust_remote_code=trust_remote_code,
                generation_config=generation_config,
            )
            nodes = useful_nodes(base.device) if chosen.num_draft_tokens == "auto" else chosen.num_draft_tokens
            if learning is None:
                return base, load_drafter(drafter, base, nodes, isolated=isolated)
            return base, learning.drafter(str(drafter), base, nodes, isolated=isolated)

        if learning is not None and not decides.lossless:
            raise LoadError(
                f"a head learns from what its target model says itself, and the verifier {decides.name} lets other "
                "tokens pass: use exact, or do without learning"
            )
        tell = on_stage or logger.info
        tell(f"loading {model or 'the embedded model'}")
        base, loaded = in_passing_thread(load)
        if loaded.withheld and chosen.num_draft_tokens != "auto":
            raise LoadError("a head that starts from nothing is drafted with once that pays: leave nodes at auto")
        if line := described(base.generation_settings, str(name)):
            logger.warning(line)
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        samples = None if learning is None else learning.tap()
        if chosen.compile:
            tell("compiling the model")
        elif chosen.num_draft_tokens == "auto" and loaded.spec.max_nodes:
            tell("timing decode steps")
        return cls(base, loaded, tokenizer, chosen, verifier=decides, samples=samples)

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a request, prompt and output together."""
        return self.engine.max_length

    def encode(self, prompt: Prompt, *, special_tokens: bool = False) -> list[int]:
        """Tokenise a text as it is, or chat messages by the chat template.

        Args:
            prompt: The text or the messages.
            special_tokens: Parse special tokens in the text of messages; by default they are plain text there. In a
                prompt that is a text they are always parsed.

        Raises:
            PromptTooLongError: The text cannot be `max_length` tokens or fewer.
            RequestError: Not a text or a list of messages, there is no chat template, or a message has the text of a
                special token, and the tokeniser cannot take it as text.
        """
        if isinstance(prompt, str):
            refuse_endless(prompt, self.max_length, longest_token(self.tokenizer))
            return list(tokenise(self.tokenizer, [prompt])["input_ids"][0])
        if self.tokenizer.chat_template is None:
            raise RequestError("the tokenizer has no chat template: give the prompt as text")
        for place, message in enumerate(prompt, start=1):
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise RequestError(f"message {place} must have a role and a content, not be {message!r}")
        return encode_chat(self.tokenizer, prompt, special_tokens=special_tokens, max_length=self.max_length)

    def submit(self, request: Request, *, stream: bool = False) -> Handle:
        """Queue a request. Safe from any thread.

        Args:
            request: What to generate.
            stream: The handle will be iterated over for tokens as they come.

        Raises:
            RequestError: The request cannot be generated.
            QueueFullError: Too many requests are waiting.
            EngineError: The engine has failed or is closed.
        """
        handle = self.engine.submit(request, stream=stream)
        with self._wake:
            self._wake.notify()
        return handle

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        special_tokens: bool = False,
        **settings: Any,
    ) -> list[Generation]:
        """Generate for one prompt or many, and wait for all. If the call is interrupted, its requests are cancelled.

        Args:
            prompts: A text, chat messages, or a list of either.
            sampling: Settings. Unset ones come from the model's `generation_config.json`, or else are greedy decoding
                of up to 256 tokens.
            special_tokens: As in `encode`.
            settings: Fields of `SamplingParams` to change, such as `max_new_tokens=100`.

        Raises:
            RequestError: A prompt or a setting cannot be used.
        """
        try:
            sampling = replace(sampling or SamplingParams(), **settings)
        except TypeError as error:
            raise RequestError(str(error).replace("SamplingParams.__init__() got an", "")) from error
        ids = [self.encode(prompt, special_tokens=special_tokens) for prompt in _as_list(prompts)]
        requests = [Request(prompt_ids, sampling, str(i)) for i, prompt_ids in enumerate(ids)]
        waiting: list[Handle] = []
        try:
            for index, request in enumerate(requests):
                if index >= self.engine.config.max_queue:
                    waiting[index - self.engine.config.max_queue].result()
                waiting.append(self.submit(request))
            return [handle.result() for handle in waiting]
        except BaseException:  # such as Ctrl-C: abandoned requests must not delay the next call
            for handle in waiting:
                handle.cancel()
            raise

    def close(self) -> None:
        """Stop the thread; unfinished requests end with an error. Called automatically at exit."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> SpeculativeLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closing or not self.engine.idle)
                    if self._closing:
                        break
                self.engine.step()
        except Exception as error:  # whatever it is, it must reach the waiting requests
            self.engine.fail(error)
        else:
            self.engine.fail(RuntimeError("it was closed"))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], dict):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
