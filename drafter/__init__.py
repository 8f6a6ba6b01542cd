"""Lossless tree speculative decoding with CTC draft heads."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from drafter.source_commit import VERSION

if TYPE_CHECKING:
    from drafter.engine.config import EngineConfig
    from drafter.errors import EngineError, LoadError, QueueFullError, RequestError, RequestTimeoutError
    from drafter.llm import SpeculativeLM
    from drafter.requests import Generation, Request, SamplingParams, TokenLogprob
    from drafter.structured_outputs import StructuredOutputs
    from drafter.text.conversation import Conversation

# Threads of an operation that wait for each other sleep, and do not spin. If another process has one of the cores, a
# thread that spins keeps the one it waits for from running, and decoding becomes several times slower. OpenMP reads
# this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = VERSION

__all__ = [
    "Conversation",
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
    "StructuredOutputs",
    "TokenLogprob",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and processes that only count or write do without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    rest = "errors" if name.endswith("Error") else "requests"
    elsewhere = {
        "Conversation": "text.conversation",
        "EngineConfig": "engine.config",
        "SpeculativeLM": "llm",
        "StructuredOutputs": "structured_outputs",
    }
    module = elsewhere.get(name, rest)
    return getattr(import_module(f"drafter.{module}"), name)
