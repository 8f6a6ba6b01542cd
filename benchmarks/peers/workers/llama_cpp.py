"""llama.cpp's server in this process, plain and with n-grams of the text as drafts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xllamacpp

from benchmarks.peers.workers.llama_gguf import write_gguf
from benchmarks.peers.workers.protocol import Decode, Decoded, Settings, Work, serve

_CACHES = {"float32": xllamacpp.ggml_type.GGML_TYPE_F32, "bfloat16": xllamacpp.ggml_type.GGML_TYPE_BF16}


def load(settings: Settings) -> Decode:
    """Start a server of a GGUF file. A model of another kind is written as one, unless that was done before."""
    given = Path(settings.model)
    file = given if given.suffix == ".gguf" else Path(settings.folder) / f"{settings.dtype}.gguf"
    if not file.exists():
        write_gguf(Path(settings.model), file, settings.dtype, settings.ends)
    server = xllamacpp.Server(_parameters(settings, file))

    def complete(prompt: list[int], max_new_tokens: int) -> tuple[list[int], int]:
        asked = {"prompt": prompt, "n_predict": max_new_tokens, "temperature": 0.0, "samplers": ["temperature"]}
        # Nothing is kept of a prompt, because it comes again in the next round.
        told = {"return_tokens": True, "verbose": True, "cache_prompt": False}
        answer: dict[str, Any] = server.handle_completions(asked | told)
        if "__verbose" not in answer:
            raise RuntimeError(f"llama.cpp answers {answer}")
        verbose = answer["__verbose"]
        times = verbose["timings"]
        return list(verbose["tokens"]), times["predicted_n"] - times.get("draft_n_accepted", 0)

    def decode(work: Work) -> Decoded:
        with ThreadPoolExecutor(settings.batch) as clients:
            answers = list(clients.map(lambda prompt: complete(prompt, work.max_new_tokens), work.prompts))
        return Decoded([tokens for tokens, _ in answers], sum(steps for _, steps in answers))

    return decode


def _parameters(settings: Settings, file: Path) -> Any:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_parallel = settings.batch
    parameters.n_ctx = settings.batch * settings.longest
    parameters.cache_type_k = parameters.cache_type_v = _CACHES[settings.dtype]
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = settings.threads
    if settings.dtype == "float32":  # Its flash attention rounds to half precision: log-probabilities move by 0.003.
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.cache_prompt = False
    parameters.cache_ram_mib = 0
    if settings.variant != "plain":
        kinds = xllamacpp.common_speculative_type
        parameters.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{settings.variant.upper()}")]
    return parameters


if __name__ == "__main__":
    serve(load, ["xllamacpp"])
