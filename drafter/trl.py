"""Rollouts for TRL's `GRPOTrainer` by an engine that has the trainer's weights; TRL itself is not imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from drafter.errors import LoadError, RequestError
from drafter.images.messages import take_images
from drafter.llm import SpeculativeLM
from drafter.many import Completed, in_order, with_settings
from drafter.prompt_kinds import is_chat
from drafter.requests import Request, SamplingParams, hashed_seed

Rollout = Callable[[list[Any], Any], dict[str, list[Any]]]
"""Prompts, of which each is continued once, and the trainer → `prompt_ids`, `completion_ids` and `logprobs` of each."""


def make_rollout(lm: SpeculativeLM) -> Rollout:
    """Return a `rollout_func`: it gives `lm` the trainer's weights, and draws what plain decoding would with them.

    `logprobs` are those of the verifying forward in fp32, after temperature and filters: of what tokens are drawn from,
    as TRL has them from vLLM. Seeds follow from the trainer's `seed` and the order of the calls.

    Args:
        lm: A model of the trained one's architecture, in memory of its own.

    Raises:
        LoadError: The verifier of `lm` is not lossless: its tokens are not drawn from the model's distribution.
    """
    verifier = lm.engine.verifier
    if not verifier.lossless:
        raise LoadError(
            f"the verifier {verifier.name} lets tokens pass that the model would not have drawn, and GRPO learns from "
            "the model's own: load it with the verifier exact"
        )
    calls = count()
    loaded: tuple[Any, int] | None = None

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        nonlocal loaded
        now = trainer, trainer.state.global_step
        # In an evaluation there are many calls for the same weights.
        if trainer.model.training or now != loaded:
            lm.update_weights(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
            loaded = now
        sampling, call = sampling_of(trainer), f"{trainer.accelerator.process_index}:{next(calls)}"
        most, requests = sampling.max_new_tokens or 1, []
        for place, ids in enumerate(_token_ids(prompts, trainer)):
            if len(ids) + most > lm.max_length:
                raise RequestError(
                    f"prompt {place} has {len(ids)} tokens, and with {most} of a completion these are more than the "
                    f"engine's {lm.max_length}: raise max_model_len, or lower max_completion_length"
                )
            settings = replace(sampling, seed=hashed_seed(trainer.args.seed, f"{call}:{place}"))
            requests.append(Request(ids, settings, str(place), drawn_logprobs=True))
        completed = Completed(lm.submit, requests, lm.engine.config.max_queue)
        results = in_order(completed, requests, 1, on_error="raise", use_tqdm=False)
        return {
            "prompt_ids": [list(request.prompt_ids) for request in requests],
            "completion_ids": [one.token_ids for one in results],
            "logprobs": [[token.logprob for token in one.logprobs or ()] for one in results],
        }

    return rollout


def sampling_of(trainer: Any) -> SamplingParams:
    """Return the settings of a trainer's completions, by its `GRPOConfig`; raise `RequestError` for others."""
    args = trainer.args
    if trainer.tools or getattr(trainer, "environment_factories", None):
        raise RequestError("tools and environments are not rolled out here: TRL's own generation goes on after a call")
    if not args.temperature > 0 or args.max_completion_length is None:
        raise RequestError("a rollout needs a temperature above 0 and a max_completion_length")
    settings = SamplingParams(
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=tuple(trainer.eos_token_ids),
        logprobs=0,
    )
    return with_settings(settings, args.generation_kwargs or {})


def _token_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """Return prompts as the trainer itself tokenises them: texts, or chats by the chat template."""
    if not is_chat(prompts[0]):
        return trainer.processing_class(text=list(prompts))["input_ids"]  # type: ignore[no-any-return]
    if any(take_images(chat)[1] for chat in prompts):
        raise RequestError("prompts with images are not rolled out here: use TRL's own generation")
    return trainer.processing_class.apply_chat_template(  # type: ignore[no-any-return]
        list(prompts),
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )["input_ids"]
