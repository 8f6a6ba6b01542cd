"""Sampling settings that come with a model, in its `generation_config.json`.

As in transformers and vLLM they are the defaults of a request. Settings that the engine does not support are errors:
ignoring them would silently give other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from drafter.errors import LoadError, RequestError, first_line, shown
from drafter.requests import ResolvedSampling

GenerationRule = Literal["auto", "ignore"]
"""`auto` uses sampling settings that come with a model, `ignore` does not."""
GENERATION_FILE = "generation_config.json"
_TAKEN = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
"""Unsupported settings that change the tokens of a decoder-only model, with the values that have no effect; null has
none either."""


def read_generation_file(folder: Path, name: str) -> dict[str, Any]:
    """Return the settings in a model's folder; empty without such a file.

    Raises:
        LoadError: The file is not a JSON object.
    """
    file = folder / GENERATION_FILE
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"model {name}: its {GENERATION_FILE} cannot be read: {first_line(error)}") from error
    if not isinstance(settings, dict):
        raise LoadError(f"model {name}: its {GENERATION_FILE} is not a JSON object")
    return settings


def sampling_defaults(settings: Mapping[str, Any], name: str, *, drawn: bool = False) -> ResolvedSampling:
    """Return the sampling defaults of requests, by the settings of the model.

    Args:
        drawn: Whether requests sample by default, as OpenAI's do, at a temperature of 1 or the model's. Otherwise they
            are greedy, unless the settings have `do_sample`, as in transformers' `generate`.

    Raises:
        LoadError: A setting is not supported, or has a value that the engine does not take.
    """
    override = f"set generation_config to ignore to decode without the model's {GENERATION_FILE}"
    for setting, neutral in _NEUTRAL.items():
        value = settings.get(setting)
        if value is not None and value not in neutral:
            raise LoadError(
                f"model {name}: its {GENERATION_FILE} asks for {setting} {shown(value)}, which this engine cannot do: "
                f"remove it there, or {override}"
            )
    given = _taken(settings)
    if not (drawn or settings.get("do_sample") is True):
        given["temperature"] = 0.0
    elif given.get("temperature") is None:
        given["temperature"] = 1.0
    try:
        return ResolvedSampling(**given)
    except RequestError as error:
        raise LoadError(f"model {name}: its {GENERATION_FILE}: {error}: correct it, or {override}") from error


def described(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a line about a model's defaults; None where it has none."""
    given = _taken(settings)
    if settings.get("do_sample") is True:
        given = {"do_sample": True, **given}
    if not given:
        return None
    listed = ", ".join(f"{setting} {value}" for setting, value in given.items())
    return (
        f"model {name}: defaults of its {GENERATION_FILE}: {listed} (what a request sets itself goes before; "
        "generation_config ignore leaves them out)"
    )


def _taken(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {setting: settings[setting] for setting in _TAKEN if settings.get(setting) is not None}
