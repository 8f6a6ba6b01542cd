"""Prompts of conversations, made once so that every decoder is measured on the same prompts.

The prompt of a later turn holds the answers before it. These are plain decoding's answers. A lossless decoder would
give the same answers, and a decoder that rounds differently still gets the same question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafter.base.causal_lm import BaseModel
from drafter.drafters.none import PlainDecoding
from drafter.engine.engine_config import EngineConfig
from drafter.engine.loop import Engine
from drafter.errors import RequestError
from drafter.evaluation.decoders import decode_all
from drafter.evaluation.questions import Question, QuestionError
from drafter.requests import Request, SamplingParams
from drafter.text.chat import encode_chat


@dataclass(frozen=True)
class Prompt:
    """One turn of a conversation.

    Args:
        request: Token ids and sampling settings, with a seed of its own.
        category: Category of its question.
        answer: Tokens of plain decoding's answer.
    """

    request: Request
    category: str
    answer: list[int]


def prompts_of(
    base: BaseModel,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    temperature: float,
    max_new_tokens: int,
    slots: int,
) -> list[Prompt]:
    """Return every turn of every question with its answer, all first turns first.

    Args:
        base: The base model.
        tokenizer: The base's tokeniser.
        questions: The conversations.
        temperature: Sampling temperature of the answers.
        max_new_tokens: Longest answer.
        slots: Conversations decoded together.

    Raises:
        QuestionError: A prompt and its answer are longer than the base's positions, or the chat template refuses it.
    """
    histories: list[list[dict[str, str]]] = [[] for _ in questions]
    prompts: list[Prompt] = []
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [index for index, question in enumerate(questions) if turn < len(question.turns)]
        requests: list[Request] = []
        for index in asked:
            question = questions[index]
            histories[index].append({"role": "user", "content": question.turns[turn]})
            try:
                ids = encode(tokenizer, histories[index])
            except RequestError as error:
                raise QuestionError(f"question {question.name}, turn {turn + 1}: {error}") from error
            if base.max_positions is not None and len(ids) + max_new_tokens > base.max_positions:
                raise QuestionError(
                    f"question {question.name}, turn {turn + 1}: {len(ids)} tokens of prompt and {max_new_tokens} of "
                    f"answer are more than the base's {base.max_positions} positions: lower max_new_tokens, or leave "
                    "the question out"
                )
            sampling = SamplingParams(max_new_tokens, temperature, seed=len(prompts) + len(requests))
            requests.append(Request(ids, sampling))
        longest = max(len(request.prompt_ids) for request in requests) + max_new_tokens
        config = EngineConfig(slots, max_length=longest, max_queue=len(requests))
        _, generations = decode_all(Engine(base, PlainDecoding(), tokenizer, config), requests)
        for index, request, generation in zip(asked, requests, generations, strict=True):
            histories[index].append({"role": "assistant", "content": generation.text})
            prompts.append(Prompt(request, questions[index].category, generation.token_ids))
    return prompts


def encode(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the token ids of a conversation up to the assistant's next answer.

    Without a chat template the conversation is the messages' texts, separated by empty lines.

    Raises:
        RequestError: The chat cannot be encoded.
    """
    if tokenizer.chat_template is None:
        return list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])
    return encode_chat(tokenizer, messages)
