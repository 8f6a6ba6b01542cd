"""What a job's engines have done since the learner last looked, from what each says that it has done by now."""

from __future__ import annotations

from dataclasses import dataclass

from drafter.statistics import BatchChoice

_SILENT_SECONDS = 60.0
"""After so long an engine that says nothing is taken to have ended."""


@dataclass(frozen=True)
class EngineBeat:
    """What an engine has done by now.

    Args:
        tokens: New tokens of its process.
        row_steps: Decode steps, counted once for each row that took part.
        choices: Which of several drafters drafts, by batch size.
        busy: Seconds in which it had something to decode.
    """

    tokens: int
    row_steps: int
    choices: tuple[BatchChoice, ...] = ()
    busy: float = 0.0


@dataclass(frozen=True)
class Decoded:
    """What all engines have done in an interval.

    Args:
        tokens: New tokens.
        row_steps: Decode steps, counted once for each row that took part.
        choices: Of each engine that has some, as it last said.
        busy: Seconds in which an engine had something to decode: the mean over engines.
    """

    tokens: int
    row_steps: int
    choices: tuple[tuple[BatchChoice, ...], ...] = ()
    busy: float = 0.0


@dataclass(frozen=True)
class _Heard:
    """The last beat of an engine, and when it came."""

    beat: EngineBeat
    at: float


class EngineBeats:
    """Adds up what engines do. Times are those of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._tokens = self._row_steps = 0
        self._busy = 0.0

    def enter(self, engine: str, beat: EngineBeat, now: float) -> None:
        """Enter what an engine has done by now.

        What it had done before it was first heard is of no interval: a learner that is started again hears of the whole
        life of engines that it did not know.
        """
        known = self._heard.get(engine)
        before = beat if known is None else known.beat
        self._tokens += beat.tokens - before.tokens
        self._row_steps += beat.row_steps - before.row_steps
        self._busy += beat.busy - before.busy
        self._heard[engine] = _Heard(beat, now)

    def take(self, now: float) -> Decoded:
        """End an interval: return what was done in it, and forget engines that have long been silent."""
        self._heard = {name: one for name, one in self._heard.items() if now - one.at <= _SILENT_SECONDS}
        choices = tuple(one.beat.choices for one in self._heard.values() if one.beat.choices)
        done = Decoded(self._tokens, self._row_steps, choices, self._busy / max(len(self._heard), 1))
        self._tokens = self._row_steps = 0
        self._busy = 0.0
        return done
