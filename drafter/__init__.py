"""Lossless tree speculative decoding with CTC draft heads."""

from drafter.engine import EngineConfig
from drafter.errors import EngineError, LoadError, QueueFullError, RequestError, RequestTimeoutError
from drafter.llm import SpeculativeLM
from drafter.requests import Generation, Request, SamplingParams, TokenLogprob

__all__ = [
    "EngineConfig",
    "EngineError",
    "Generation",
    "LoadError",
    "QueueFullError",
    "Request",
    "RequestError",
    "RequestTimeoutError",
    "SamplingParams",
    "SpeculativeLM",
    "TokenLogprob",
]
