"""A request becomes a sequence, if the base can decode it."""

from __future__ import annotations

from typing import Any

from drafter.base.causal_lm import BaseModel
from drafter.engine.sequences.handle import Handle
from drafter.engine.sequences.sequence import Sequence
from drafter.errors import PromptTooLongError, RequestError
from drafter.requests import Request
from drafter.verifiers.contract import Verifier


def refuse_unusable(request: Request, base: BaseModel, verifier: Verifier, max_length: int) -> None:
    """Refuse a request that cannot be decoded.

    Args:
        request: What was submitted.
        base: Says which tokens there are.
        verifier: Says which settings it defines.
        max_length: Tokens that prompt and output may have together.

    Raises:
        RequestError: The prompt is empty, too long, or not of token ids in the vocabulary; a bias or a stop token is
            not; or the verifier does not define what the settings ask for.
    """
    verifier.refuse(request.sampling)
    ids = request.prompt_ids
    if len(ids) == 0:
        raise RequestError("the prompt is empty: give at least one token")
    refuse_long(len(ids), max_length)
    if not all(isinstance(one, int) for one in ids):
        raise RequestError("the prompt must be token ids: integers")
    if min(ids) < 0 or max(ids) >= base.vocab_size:
        raise RequestError(f"the prompt has token ids outside the vocabulary of {base.vocab_size}")
    if (beyond := max(dict(request.sampling.logit_bias), default=0)) >= base.vocab_size:
        raise RequestError(f"logit_bias has token {beyond}, outside the vocabulary of {base.vocab_size}")
    if (beyond := max(request.sampling.stop_token_ids, default=0)) >= base.vocab_size:
        raise RequestError(f"stop_token_ids has token {beyond}, outside the vocabulary of {base.vocab_size}")


def refuse_long(prompt_tokens: int, max_length: int) -> None:
    """Refuse a prompt that leaves no room for output.

    Args:
        prompt_tokens: Its length.
        max_length: Tokens that prompt and output may have together.

    Raises:
        PromptTooLongError: It leaves none.
    """
    if prompt_tokens >= max_length:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens, but prompt and output together may have {max_length}: "
            "shorten the prompt or raise max_length"
        )


def new_sequence(handle: Handle, base: BaseModel, tokenizer: Any, verifier: Verifier, max_length: int) -> Sequence:
    """The sequence of a request that `refuse_unusable` has let pass.

    Args:
        handle: The caller's end.
        base: Says which tokens end a sequence.
        tokenizer: Decodes its tokens.
        verifier: Decides which of its draft tokens are accepted.
        max_length: Tokens that prompt and output may have together.
    """
    prompt, sampling = len(handle.request.prompt_ids), handle.request.sampling.over()
    ends = frozenset() if sampling.ignore_eos else base.eos_token_ids
    return Sequence(
        handle,
        limit=min(sampling.max_new_tokens, max_length - prompt),
        length=prompt - 1,
        eos=ends | set(sampling.stop_token_ids),
        tokenizer=tokenizer,
        verifier=verifier,
    )
