"""Every causal LM of transformers as a base: small and random, decoded in two rows and compared with `generate`.

The table in `docs/families.md` is written by::

    python -m tests.support.families docs/families.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafter.drafters.contract import PlainDecoding
from drafter.errors import LoadError, one_line
from drafter.requests import Request, SamplingParams
from drafter.target_model.architecture import max_positions, random_model, refuse_unsupported, small_config
from drafter.target_model.model import BaseModel
from tests.support.models import OracleDrafter, generate_reference, run_engine

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_MAMBA, _ATTENTION = "linear_attention", "full_attention"
_SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "granitemoehybrid": {"layer_types": [_MAMBA, _MAMBA, _ATTENTION, _MAMBA], "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
}
"""What a family's own defaults lack, and the kinds of layers of published models where the defaults have others."""
_WINDOWED = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
_PROMPTS, _NEW = (40, 15), 10
"""Tokens of two rows, and of what is generated: past every window of a small copy."""
Outcome = Literal["equal", "refused", "differs", "not built"]


@dataclass(frozen=True)
class Tried:
    """What became of a family.

    Args:
        family: transformers' `model_type`.
        outcome: `equal` to `generate`, `refused` at load, `differs`, which must not be, or `not built`, where
            transformers builds no small model of its default configuration here.
        reason: Why it is not equal.
    """

    family: str
    outcome: Outcome
    reason: str = ""


def try_family(family: str) -> Tried:
    """Build a small model of a family, load it as a base, and decode with it if it is not refused."""
    tried = _try(family, {})
    if tried.reason.startswith("reads in both directions"):
        as_decoder = _try(family, {"is_decoder": True})
        if as_decoder.outcome == "equal":
            return Tried(
                family, "equal", "only with `is_decoder`; without it they read in both directions and are refused"
            )
    return tried


def _try(family: str, settings: dict[str, Any]) -> Tried:
    try:
        config = _config(family, settings)
        refuse_unsupported(family, config)
        config = small_config(config, max_positions(config.get_text_config(decoder=True)))
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if kind.config_class is config.sub_configs.get("text_config"):  # as transformers loads it
            config = config.get_text_config(decoder=True)
        model = random_model(kind, config)
    except LoadError as error:
        return _refused(family, error)
    except Exception as error:  # whatever a family's code raises for what its own defaults are
        return Tried(family, "not built", f"{type(error).__name__}: {_short(error)}")
    model.generation_config = GenerationConfig(pad_token_id=0)
    try:
        base = BaseModel(model, family)
    except LoadError as error:
        return _refused(family, error)
    try:
        return _decode(family, model, base)
    except Exception as error:  # no family may end an engine
        return Tried(family, "differs", f"{type(error).__name__}: {_short(error)}")


def _decode(family: str, model: Any, base: BaseModel) -> Tried:
    """Decode rows of different lengths together, plainly and by trees, and compare them with `generate`.

    The last row ends at the model's last position.
    """
    room = (base.max_positions or 256) - _NEW
    lengths = (min(_PROMPTS[0], room), min(_PROMPTS[1], room), room)
    ids = (1 + torch.arange(1, sum(lengths) + 1) * 7919 % (base.vocab_size - 2)).split(lengths)
    prompts = [some.tolist() for some in ids]
    expected = [generate_reference(model, prompt, _NEW) for prompt in prompts]
    requests = [Request(prompt, SamplingParams(_NEW, ignore_eos=True)) for prompt in prompts]
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    for drafter in (PlainDecoding(), OracleDrafter(texts)):
        found = [
            one.token_ids
            for one in run_engine(
                base, drafter, requests, max_num_seqs=3, num_draft_tokens=8, max_model_len=room + _NEW
            )
        ]
        if found != expected:
            return Tried(family, "differs", f"{type(drafter).__name__}: {found} instead of {expected}")
    return Tried(family, "equal")


def _config(family: str, settings: dict[str, Any]) -> Any:
    kind, settings = CONFIG_MAPPING[family], _SETTINGS.get(family, {}) | settings
    if hasattr(kind(**settings), "use_sliding_window"):
        settings = settings | _WINDOWED
    return kind(**settings)


def _refused(family: str, error: LoadError) -> Tried:
    return Tried(family, "refused", _short(_differing(str(error).removeprefix(f"{family}: "), family)))


def _differing(message: str, family: str) -> str:
    """Return the part of a refusal that differs between families."""
    message = message.removeprefix(f"{family} ").split(";")[0].split(", which counts")[0].split(", as encoders")[0]
    if message.startswith("gives other logits"):
        return "other logits"
    return message


def _short(error: BaseException | str) -> str:
    return one_line(error, 500).replace("|", "/")


def table(tried: Iterable[Tried]) -> Iterator[str]:
    """Yield the lines of the page."""
    rows = sorted(tried, key=lambda one: one.family)
    count = {outcome: sum(one.outcome == outcome for one in rows) for outcome in ("equal", "refused", "not built")}
    yield "# Families of models\n\n"
    yield (
        f"The {len(rows)} causal language models of transformers {transformers.__version__}, each as a small random "
        "model of its default configuration, with the kinds of layers that published models have: rows of 40 and 15 "
        "tokens, longer than its windows, and one that ends at its last position are decoded together, plainly and "
        f"with draft trees. {count['equal']} give the tokens of `generate`, {count['refused']} are refused at load, "
        f"and for {count['not built']} the default configuration builds no model here. A target model's layers are "
        "softmax attention, or keep a recurrent state in transformers' own cache: linear attention, state spaces, "
        "short convolutions. It must run with a tree mask, explicit positions and a slot cache, and give the same "
        "logits with them as alone. Settings may matter, too: `falcon` with ALiBi is refused. Models that see are on "
        "[a page of their own](images.md), and so are [formats of weights](formats.md).\n\n"
        "In recurrent layers, all nodes of a draft tree run at once where a kernel for trees is known: for short "
        "convolutions, the gated delta rule, Kimi delta attention and Mamba 2, and on a CPU in float32 for Mamba 1. "
        "Others run once for each depth of the tree, and read what follows a prompt's first chunk token by token. "
        "Models with recurrent layers share what prompts have in common up to a multiple of 256 tokens, or up to the "
        "end of the shorter one, draft for no other model, and are not compiled. Those whose layers run a tree at once "
        "are recorded as CUDA graphs.\n\n"
        "`python -m tests.support.families docs/families.md` writes this page, and `make test-slow` checks it.\n\n"
    )
    yield "| outcome | reason | `model_type` |\n|---|---|---|\n"
    outcomes = sorted({(one.outcome, one.reason) for one in rows})
    for outcome, reason in outcomes:
        families = [f"`{one.family}`" for one in rows if (one.outcome, one.reason) == (outcome, reason)]
        yield f"| {outcome} | {reason} | {', '.join(families)} |\n"


def main() -> None:
    """Try all families, or those that are named, and write the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("families", nargs="*")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    tried = []
    for family in given.families or FAMILIES:
        tried.append(try_family(family))
        print(tried[-1], file=sys.stderr, flush=True)
    given.page.write_text("".join(table(tried)), encoding="utf-8")


if __name__ == "__main__":
    main()
