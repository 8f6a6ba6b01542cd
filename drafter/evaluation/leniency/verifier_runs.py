"""The same requests decoded under several verifiers, each beside plain decoding in the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drafter.base.causal_lm import BaseModel
from drafter.drafters.contract import Drafter
from drafter.drafters.none import PlainDecoding
from drafter.engine.engine_config import EngineConfig
from drafter.engine.loop import Engine
from drafter.evaluation.decoders import decode_all
from drafter.requests import Generation, Request
from drafter.statistics import DecodeCounts, mean_acceptance_length, speedup, total
from drafter.verifiers.registry import make_verifier
from drafter.verifiers.verifier_settings import VerifierSettings

EXACT = VerifierSettings()
_WARM_UP = 2
_GRIDS: dict[str, tuple[dict[str, float], ...]] = {
    "fly": tuple({"theta": theta} for theta in (1.05, 1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0)),
    "pad": tuple({"sigma": sigma} for sigma in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)),
    "typical": tuple({"delta": delta} for delta in (0.9, 0.5, 0.3, 0.09, 0.03, 0.01)),
}
"""Settings of each lenient verifier, from the strictest: the published one, and some on both sides of it."""


def verifier_grid(settings: VerifierSettings) -> list[VerifierSettings]:
    """Return settings of a lenient verifier, from the strictest to the most lenient.

    Args:
        settings: Its name, and what is the same in all of them.
    """
    varied = _GRIDS[settings.name]
    if any(getattr(settings, name) is not None for name in varied[0]):
        return [settings]  # somebody has chosen
    return [replace(settings, **one) for one in varied]  # type: ignore[arg-type]


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


def verifier_runs(
    base: BaseModel,
    tokenizer: Any,
    drafter: Callable[[], Drafter],
    requests: Sequence[Request],
    verifiers: Sequence[VerifierSettings],
    config: EngineConfig,
    rounds: int,
) -> Iterator[VerifierRun]:
    """Yield what comes of the requests under each verifier.

    Only two engines exist at a time: one that decodes plainly, and that of the verifier.

    Args:
        base: The base model.
        tokenizer: Of the base.
        drafter: Makes a new drafter.
        requests: What to decode.
        verifiers: The verifiers' settings.
        config: The engines' sizes; requests wait in the queue.
        rounds: How often everything is timed.

    Raises:
        LoadError: A verifier does not fit the base or the drafter.
        RequestError: A verifier does not take the requests' settings.
    """
    config = replace(config, max_queue=max(config.max_queue, len(requests)))
    plain = Engine(base, PlainDecoding(), tokenizer, config)
    decode_all(plain, requests[:_WARM_UP])
    for settings in verifiers:
        engine = Engine(base, drafter(), tokenizer, config, verifier=make_verifier(settings))
        decode_all(engine, requests[:_WARM_UP])
        rates: list[float] = []
        plain_rates: list[float] = []
        first: list[Generation] = []
        for turn in range(rounds):
            # The order alternates, so that a machine that grows busy disturbs both alike.
            both = [(engine, rates), (plain, plain_rates)]
            for one, found in both if turn % 2 == 0 else both[::-1]:
                seconds, made = decode_all(one, requests)
                found.append(sum(len(generation.token_ids) for generation in made) / seconds)
                if one is engine and not first:
                    first = made
        yield VerifierRun(
            settings,
            [one.token_ids for one in first],
            [one.text for one in first],
            sum(len(one.lenient) for one in first),
            total(one.counts for one in first),
            rates,
            plain_rates,
        )
