"""The same requests decoded under several verifiers, each beside plain decoding in the same round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import Drafter
from drafter.drafters.none import PlainDecoding
from drafter.engine.engine_config import EngineConfig
from drafter.engine.loop import Engine
from drafter.evaluation.decoders import decode_all
from drafter.requests import Generation, Request
from drafter.statistics import DecodeCounts, mean_acceptance_length, per_second, speedup, total
from drafter.verifiers.registry import make_verifier
from drafter.verifiers.verifier_settings import VerifierSettings

_WARM_UP = 2


@dataclass(frozen=True)
class VerifierRun:
    """What came of the requests under one verifier.

    Args:
        verifier: Its settings.
        token_ids: New tokens of each request, in the first round.
        texts: Their texts.
        lenient_tokens: Tokens that the base would not have chosen, in the first round.
        counts: Speculation counts of the first round.
        rates: Tokens per second, round by round.
        plain_rates: The same of plain decoding in the same rounds.
    """

    verifier: VerifierSettings
    token_ids: list[list[int]]
    texts: list[str]
    lenient_tokens: int
    counts: DecodeCounts
    rates: list[float] = field(default_factory=list)
    plain_rates: list[float] = field(default_factory=list)

    @property
    def beta(self) -> float:
        """β: new tokens per base forward."""
        return mean_acceptance_length(self.counts)

    @property
    def gamma(self) -> float:
        """γ: speed relative to plain decoding."""
        return speedup(self.rates, self.plain_rates)


class VerifierTrials:
    """Decodes the same requests under one verifier after another.

    Each has an engine of its own: an engine learns what pays under its verifier, reads the hidden states that this asks
    for, and on a GPU repeats steps that were recorded with it. So two engines exist at a time, this and a plain one.

    Args:
        base: The base model.
        tokenizer: Of the base.
        drafter: Makes a new drafter.
        requests: What to decode.
        config: The engines' sizes; requests wait in the queue.
        rounds: How often everything is timed.

    Attributes:
        depth: Draft tokens of a path at most.
    """

    def __init__(
        self,
        base: BaseModel,
        tokenizer: Any,
        drafter: Callable[[], Drafter],
        requests: Sequence[Request],
        config: EngineConfig,
        rounds: int,
    ) -> None:
        config = replace(config, max_queue=max(config.max_queue, len(requests)))
        self._base, self._tokenizer, self._drafter = base, tokenizer, drafter
        self._requests, self._config, self._rounds = requests, config, rounds
        gc.collect()  # an engine refers to itself: one that nobody uses any more holds the device's memory until then
        spec = drafter().spec
        self.depth = min(spec.max_depth, spec.max_nodes if config.nodes == "auto" else config.nodes)
        self._plain = Engine(base, PlainDecoding(), tokenizer, config)
        decode_all(self._plain, requests[:_WARM_UP])

    def run(self, settings: VerifierSettings) -> VerifierRun:
        """Return what comes of the requests under a verifier.

        Raises:
            LoadError: The verifier does not fit the base or the drafter.
            RequestError: It does not take the requests' settings.
        """
        plain, requests = self._plain, self._requests
        gc.collect()
        engine = Engine(self._base, self._drafter(), self._tokenizer, self._config, verifier=make_verifier(settings))
        decode_all(engine, requests[:_WARM_UP])
        rates: list[float] = []
        plain_rates: list[float] = []
        first: list[Generation] = []
        for turn in range(self._rounds):
            # The order alternates, so that a machine that grows busy disturbs both alike.
            both = [(engine, rates), (plain, plain_rates)]
            for one, found in both if turn % 2 == 0 else both[::-1]:
                seconds, made = decode_all(one, requests)
                found.append(per_second(sum(len(generation.token_ids) for generation in made), seconds))
                if one is engine and not first:
                    first = made
        return VerifierRun(
            settings,
            [one.token_ids for one in first],
            [one.text for one in first],
            sum(len(one.lenient) for one in first),
            total(one.counts for one in first),
            rates,
            plain_rates,
        )
