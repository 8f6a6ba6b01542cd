from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from drafter.calls import CallForm, Calls
from drafter.drafters.contract import PlainDecoding
from drafter.engine.engine import Engine
from drafter.errors import LoadError, RequestError
from drafter.requests import (
    Request,
    ResolvedSampling,
    SamplingParams,
    described,
    read_generation_file,
    sampling_defaults,
)
from drafter.target_model.loading import load_base
from tests.support.models import (
    SpellingTokenizer,
    generate_reference,
    random_model,
    random_prompts,
    run_engine,
    tokens_of,
)

Settings = dict[str, Any]


@pytest.mark.parametrize(
    ("settings", "greedy", "drawn"),
    [
        ({}, {}, {"temperature": 1.0}),
        ({"temperature": 0.6, "top_p": 0.9}, {"top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True}, {"temperature": 1.0}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": 0.1, "max_new_tokens": 7},
            {"temperature": 0.6, "top_k": 20, "min_p": 0.1, "max_new_tokens": 7},
            {"temperature": 0.6, "top_k": 20, "min_p": 0.1, "max_new_tokens": 7},
        ),
        ({"repetition_penalty": 1.3, "top_p": None}, {"repetition_penalty": 1.3}, {"temperature": 1.0}),
    ],
)
def test_defaults_are_those_of_the_file(settings: Settings, greedy: Settings, drawn: Settings) -> None:
    assert sampling_defaults(settings, "m") == ResolvedSampling(**greedy)
    penalty = {"repetition_penalty": settings.get("repetition_penalty", 1.0)}
    assert sampling_defaults(settings, "m", drawn=True) == ResolvedSampling(**penalty | drawn)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 4}, "asks for num_beams 4, which this engine cannot do: .* generation_config to ignore"),
        ({"suppress_tokens": [3]}, r"suppress_tokens \[3\]"),
        ({"bad_words_ids": [[5, 6]]}, "bad_words_ids"),
        ({"forced_eos_token_id": 2}, "forced_eos_token_id 2"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
        ({"min_new_tokens": 3}, "min_new_tokens"),
        ({"repetition_penalty": -1}, "repetition_penalty must be more than 0"),
        ({"top_k": "many"}, "top_k must be an integer"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        sampling_defaults(settings, "m")


def test_settings_of_transformers_that_ask_for_nothing_are_taken() -> None:
    """Those that are on unless somebody says otherwise, and those that are null."""
    everything = GenerationConfig._get_default_generation_params()
    assert sampling_defaults(everything, "m") == ResolvedSampling(top_k=50)
    assert sampling_defaults(GenerationConfig().to_dict(), "m") == ResolvedSampling()


def test_what_is_given_goes_before_and_the_rest_is_the_models() -> None:
    defaults = ResolvedSampling(temperature=0.6, top_p=0.9, repetition_penalty=1.3)
    own = SamplingParams(temperature=0.0, top_k=5, logprobs=None, stop=("x",), seed=4)
    assert own.over(defaults) == ResolvedSampling(
        temperature=0.0, top_k=5, top_p=0.9, repetition_penalty=1.3, stop=("x",), seed=4
    )
    assert own.over(defaults).over(ResolvedSampling()) == own.over(defaults)
    assert SamplingParams().over() == ResolvedSampling(256, 0.0, 0, 1.0, 0.0, 1.0)


def folder_with(path: Path, **settings: Any) -> Path:
    model = random_model("llama")
    model.generation_config = GenerationConfig(**settings, eos_token_id=2, bos_token_id=1, pad_token_id=0)
    model.save_pretrained(path)
    return path


def test_a_model_decodes_as_generate_does_by_its_settings(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, repetition_penalty=1.3)
    base = load_base(folder, device="cpu")
    line = described(base.generation_settings, str(folder))
    assert line is not None
    assert line.startswith(f"model {folder}: defaults of its generation_config.json: repetition_penalty 1.3 (")
    prompts = random_prompts(4, seed=3)
    requests = [Request(prompt, SamplingParams(max_new_tokens=12)) for prompt in prompts]
    found = tokens_of(run_engine(base, PlainDecoding(), requests, max_num_seqs=2))
    assert found == [generate_reference(base.model, prompt, 12) for prompt in prompts]
    plain = [Request(prompt, SamplingParams(12, repetition_penalty=1.0)) for prompt in prompts]
    ignoring = load_base(folder, device="cpu", generation_config="ignore")
    assert ignoring.eos_token_ids == {2}
    overridden = tokens_of(run_engine(base, PlainDecoding(), plain, max_num_seqs=2))
    assert overridden == tokens_of(run_engine(ignoring, PlainDecoding(), requests, max_num_seqs=2))
    assert overridden != found


def test_an_engine_refuses_a_model_that_asks_for_beams(tmp_path: Path) -> None:
    base = load_base(folder_with(tmp_path, num_beams=3), device="cpu")
    with pytest.raises(LoadError, match="num_beams 3"):
        Engine(base, PlainDecoding(), SpellingTokenizer())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words", ["a", "\ud83d"]),
        ("stop", "a\udc00"),
        *(
            (f"structured_outputs.{kind}", {kind: value})
            for kind, value in {
                "choice": ["\ud83d"],
                "regex": "[\ud83d]",
                "grammar": 'start: "\ud83d"',
                "json": {"const": "\ud83d"},
                "calls": Calls(CallForm(), (("\ud83d", "{}"),)),
            }.items()
        ),
    ],
)
def test_half_a_character_is_refused_in_each_text(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} has half a character: an unpaired surrogate$"):
        SamplingParams(**{name.partition(".")[0]: value})


def test_a_seed_that_would_be_another_one_at_the_endpoint_is_refused() -> None:
    assert SamplingParams(seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(RequestError, match=r"seed must be less than 2\*\*63, not 9223372036854775808"):
        SamplingParams(seed=2**63)


def test_files_that_are_none(tmp_path: Path) -> None:
    assert read_generation_file(tmp_path, "m") == {}
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(LoadError, match=r"m: its generation_config\.json is not a JSON object"):
        read_generation_file(tmp_path, "m")
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(LoadError, match="cannot be read"):
        read_generation_file(tmp_path, "m")
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.8}))
    assert described(read_generation_file(tmp_path, "m"), "m") is not None
    assert described({"eos_token_id": 3}, "m") is None
