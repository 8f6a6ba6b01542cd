"""Time of a decoding step by stage, from the engine's own stage times."""

from __future__ import annotations

from collections.abc import Sequence

from drafter.engine.loop import Engine
from drafter.evaluation.decoders import decode_all
from drafter.requests import Request

STAGES = ("draft", "tree", "verify", "commit", "host")
"""Stages of a decoding step: the head's forward, the tree search, the base's forward with the verifier's decision,
the commit of accepted nodes, and everything else. On a GPU a step is queued as a whole, and all of it counts as
`verify`."""


def stage_seconds(engine: Engine, requests: Sequence[Request]) -> tuple[dict[str, float], int]:
    """Decode requests. Return the seconds of each of `STAGES`, without prefills, and the number of new tokens."""
    before = engine.state().stage_seconds
    _, generations = decode_all(engine, requests)
    spent = {stage: seconds - before[stage] for stage, seconds in engine.state().stage_seconds.items()}
    spent["verify"] += spent["wait"]
    return {stage: spent[stage] for stage in STAGES}, sum(len(one.token_ids) for one in generations)
