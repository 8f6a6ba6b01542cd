"""What engines have done between two looks: each counts from where it was first heard, and the silent are forgotten."""

from __future__ import annotations

from drafter.statistics import BatchChoice
from pipeline.learning.feed import EngineBeat, EngineBeats

CHOICES = (BatchChoice(4, "ngram", 1, ()),)


def test_each_engine_counts_from_where_it_was_first_heard() -> None:
    beats = EngineBeats()
    beats.enter("old", EngineBeat(10**6, 10**6), now=0.0)
    beats.enter("new", EngineBeat(0, 0), now=0.0)
    beats.enter("old", EngineBeat(10**6 + 64, 10**6 + 32), now=1.0)
    beats.enter("new", EngineBeat(5, 4), now=1.0)
    assert beats.take(now=2.0) == EngineBeat(69, 36)
    assert beats.take(now=3.0) == EngineBeat(0, 0)
    beats.enter("old", EngineBeat(10**6 + 65, 10**6 + 33), now=4.0)
    assert beats.take(now=5.0) == EngineBeat(1, 1)


def test_who_has_long_been_silent_has_no_vote_and_begins_anew() -> None:
    beats = EngineBeats()
    beats.enter("gone", EngineBeat(0, 0, CHOICES), now=0.0)
    beats.enter("here", EngineBeat(0, 0, CHOICES), now=0.0)
    assert beats.take(now=60.0).choices == (*CHOICES, *CHOICES)
    beats.enter("here", EngineBeat(1, 1, CHOICES), now=60.0)
    beats.enter("gone", EngineBeat(7, 7, CHOICES), now=0.0)
    assert beats.take(now=61.0) == EngineBeat(8, 8, CHOICES)  # its last tokens count
    beats.enter("gone", EngineBeat(100, 100), now=62.0)
    assert beats.take(now=63.0) == EngineBeat(0, 0, CHOICES)


def test_busy_seconds_are_those_of_an_engine_on_average() -> None:
    beats = EngineBeats()
    for engine in ("a", "b"):
        beats.enter(engine, EngineBeat(0, 0, busy=100.0), now=0.0)
    beats.enter("a", EngineBeat(4, 4, busy=102.0), now=1.0)
    beats.enter("b", EngineBeat(2, 2, busy=101.0), now=1.0)
    assert beats.take(now=2.0) == EngineBeat(6, 6, busy=1.5)
    assert beats.take(now=100.0) == EngineBeat(0, 0)
