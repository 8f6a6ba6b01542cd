"""Published EAGLE-3 heads draft what the public code computes of them.

`eagle3-speculators-0.9.0.json` says which code made its numbers, and from what.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.drafters.contract import PlainDecoding
from drafter.drafters.registry import load_drafter
from drafter.errors import LoadError
from drafter.heads.checkpoint import load_head
from drafter.heads.losses import DraftBatch
from drafter.methods.eagle3.head import Eagle3Head
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from tests.support.models import run_engine, tokens_of
from tests.support.public_heads import base_with_embeddings, formula, write_head

DATA = json.loads(Path(__file__).with_name("eagle3-speculators-0.9.0.json").read_text())
CASES: dict[str, Any] = {case["name"]: case for case in DATA["cases"]}
VOCABULARY, WIDTH = 23, 8


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return base_with_embeddings(VOCABULARY, WIDTH)


def tensors_of(case: dict[str, Any]) -> dict[str, Tensor]:
    tokens = torch.tensor(DATA["draft_tokens"])
    found = {name: formula(name, shape) for name, shape in case["shapes"].items() if name not in ("d2t", "t2d")}
    found["d2t"] = tokens - torch.arange(len(tokens))
    found["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, tokens, True)
    return found


def speculators(folder: Path, case: dict[str, Any], **changes: Any) -> Path:
    return write_head(folder, case["config"] | changes, tensors_of(case))


def midlayer(folder: Path, case: dict[str, Any], **changes: Any) -> Path:
    """The same head as SpecForge writes it: all of the configuration at the top, no embeddings."""
    config = deepcopy(case["config"])
    layer = config.pop("transformer_layer_config")
    rope = layer.pop("rope_parameters")
    for key in ("speculators_model_type", "speculators_config", "eagle_aux_hidden_state_layer_ids"):
        del config[key]
    config |= layer | {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": rope.pop("rope_theta")}
    config |= {"rope_scaling": rope if rope["rope_type"] != "default" else None} | changes
    tensors = {name.replace("layers.0.", "midlayer."): one for name, one in tensors_of(case).items()}
    del tensors["embed_tokens.weight"]
    return write_head(folder, config, tensors)


def own_name(folder: Path, case: dict[str, Any], **changes: Any) -> Path:
    """The same head as SafeAILab/EAGLE writes it: its configuration began as its base's."""
    return midlayer(folder, case, architectures=["LlamaForCausalLM"], num_hidden_layers=40, **changes)


def loaded(folder: Path, base: BaseModel) -> Eagle3Head:
    head = load_head(folder, base)
    assert isinstance(head, Eagle3Head)
    return head


@pytest.mark.parametrize("layout", [speculators, midlayer, own_name])
@pytest.mark.parametrize("name", CASES)
def test_a_loaded_head_computes_what_the_public_code_does(
    base: BaseModel, tmp_path: Path, layout: Any, name: str
) -> None:
    case = CASES[name]
    head = loaded(layout(tmp_path, case), base)
    assert head.hidden_layers == (0, 1, 2)
    tokens = torch.tensor([DATA["tokens"]])
    length, expected = tokens.shape[1], torch.tensor(case["logits"])
    hidden = formula("hidden", (1, length, 3 * WIDTH))
    depth = head.config.depth
    # The public code's entry k is the token at k + 1, and its step u follows the text to the token after u more.
    anchors = torch.arange(1, length)[None]
    after = torch.cat([tokens, torch.ones(1, depth, dtype=torch.long)], 1)
    targets = after[0, anchors[..., None] + torch.arange(1, depth + 1)]
    batch = DraftBatch(tokens, anchors, targets, torch.full_like(anchors, depth))
    found = head.log_probs(head.unrolled(base, batch, hidden))[0]
    compared = 0
    for step, logits in enumerate(expected):
        for entry in range(length - 1 - step):
            assert torch.allclose(found[entry, step], logits[entry].log_softmax(0), atol=1e-5)
            compared += 1
    assert compared == 6 + 5 + 4 + 3
    assert head.base_tokens(torch.arange(9)).tolist() == DATA["draft_tokens"]


@pytest.mark.parametrize("layout", [speculators, midlayer, own_name])
def test_it_drafts_and_the_tokens_stay_those_of_plain_decoding(base: BaseModel, tmp_path: Path, layout: Any) -> None:
    requests = [
        Request([1 + place, 7, 9], SamplingParams(max_new_tokens=12, temperature=float(place % 2), seed=place))
        for place in range(5)
    ]
    drafter = load_drafter(layout(tmp_path, CASES["llama"]), base, 8)
    plain = run_engine(base, PlainDecoding(), requests, max_num_seqs=2, max_model_len=48)
    drafted = run_engine(base, drafter, requests, max_num_seqs=2, max_model_len=48, num_draft_tokens=8)
    assert tokens_of(drafted) == tokens_of(plain)
    assert sum(one.counts.num_draft_tokens for one in drafted) > 0


def test_layers_are_counted_as_their_writers_count_them(base: BaseModel, tmp_path: Path) -> None:
    case = CASES["llama"]
    states = speculators(tmp_path / "a", case, eagle_aux_hidden_state_layer_ids=[1, 1, 3])
    outputs = midlayer(tmp_path / "b", case, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 2]})
    assert loaded(states, base).hidden_layers == (0, 0, 2)
    assert loaded(outputs, base).hidden_layers == (0, 2, 2)


def test_it_says_which_base_it_was_made_for(base: BaseModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["llama"]
    config = case["config"]["speculators_config"] | {"verifier": {"name_or_path": "some/Base-8B", "architectures": []}}
    head = loaded(speculators(tmp_path, case, speculators_config=config), base)
    assert head.provenance is not None
    assert (head.provenance.base_name, head.provenance.training) == ("some/Base-8B", {"layout": "speculators"})
    assert "was made for 'some/Base-8B' and has the sizes of 'the base'" in caplog.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"hidden_size": 16},
            "belongs to another target model, not to 'the base': its hidden_size is 16, and that of the target model 8",
        ),
        ({"vocab_size": 24}, "its vocab_size is 24, and that of the target model 23"),
        ({"attention_bias": True}, "has attention_bias = True, and only False can be run"),
        ({"hidden_act": "gelu"}, "has hidden_act = 'gelu', and only 'silu' can be run"),
        ({"target_hidden_size": 16}, "is of another width than its target model: 8 and 16"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling 'yarn' is not known"),
        ({"num_attention_heads": "two"}, "its config.json says num_attention_heads = 'two', which is no number"),
        ({"fc_norm": True}, "tensor 'fc_norm.0.weight' is missing"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "a target model of 3 layers does not have"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["0", "1", "2"]}},
            r"eagle_aux_hidden_state_layer_ids = \['0', '1', '2'\], which are no layers",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 1}}, "layer_ids = 1, which are no layers"),
        ({"eagle_config": "low"}, "its config.json says eagle_config = 'low', which are no named values"),
        ({"intermediate_size": 16.0}, "its config.json says intermediate_size = 16.0, which is no integer above 0"),
        ({"rope_scaling": "yarn"}, "its config.json says rope_scaling = 'yarn', which are no named values"),
        ({"rope_scaling": {"rope_type": "linear", "factor": []}}, r"draft head .*: float\(\) argument must be"),
        ({"mask_token_id": 3, "block_size": 8}, "its config.json has 'block_size', 'mask_token_id', which may mean"),
        ({"parallel_drafting": False}, "its config.json has 'parallel_drafting'"),
        ({"quantization_config": {"bits": 4}}, "its config.json has 'quantization_config'"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "is of the architecture 'DFlashLagunaForCausalLM'"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "is of the architecture 'LlamaForCausalLMEagle'"),
        ({"model_type": "gemma3_text"}, "has a layer like 'gemma3_text', and only llama"),
        ({"layer_types": ["sliding_attention"]}, "only full attention is run"),
        ({"use_last_layernorm": False}, "has use_last_layernorm = False, and only True can be run"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "has eagle_config.parallel_draft_step = 4, and only 1"),
        ({"eagle_config": {"gate": 1}}, "its config.json has 'eagle_config.gate'"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor = 0.5, and only 1",
        ),
        ({"rope_scaling": {"mrope_section": [1, 1, 1]}}, "its config.json has 'rope_scaling.mrope_section'"),
        ({"target_hidden_size": "8"}, "are not as published ones: ValueError: "),
    ],
)
def test_what_cannot_be_run_is_refused(base: BaseModel, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(LoadError, match=reason):
        load_head(midlayer(tmp_path, CASES["llama"], **changes), base)


def test_what_says_nothing_of_drafting_is_passed_over(base: BaseModel, tmp_path: Path) -> None:
    """As NVIDIA's model optimiser and transformers write it."""
    said: dict[str, Any] = {"use_aux_hidden_state": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    said |= {"parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1, "next_layer_regular": True}
    notes = {"auto_map": {"AutoModel": "x"}, "id2label": {"0": "A"}, "dtype": "bfloat16", "block_size": None}
    loaded(midlayer(tmp_path, CASES["llama"], eagle_config=said, target_model_type="llama", **notes), base)


def test_several_layers_are_refused(base: BaseModel, tmp_path: Path) -> None:
    case = CASES["llama"]
    two = case["config"]["transformer_layer_config"] | {"num_hidden_layers": 2}
    with pytest.raises(LoadError, match="has num_hidden_layers = 2, and only 1 can be run"):
        load_head(speculators(tmp_path, case, transformer_layer_config=two), base)


def test_a_layer_without_a_configuration_is_refused(base: BaseModel, tmp_path: Path) -> None:
    folder = speculators(tmp_path, CASES["llama"], transformer_layer_config=None)
    with pytest.raises(LoadError, match=r"its config\.json says hidden_size = None, which is no number"):
        load_head(folder, base)


def test_embeddings_of_another_base_are_noticed(base: BaseModel, tmp_path: Path) -> None:
    case = CASES["llama"]
    tensors = tensors_of(case)
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].flip(0).contiguous()
    folder = write_head(tmp_path, case["config"], tensors)
    with pytest.raises(LoadError, match="the token embeddings that it was trained with are others"):
        load_head(folder, base)
    tensors["embed_tokens.weight"] = formula("embed_tokens.weight", (VOCABULARY, WIDTH)).bfloat16()
    load_head(write_head(tmp_path, case["config"], tensors), base)


def test_tensors_that_nobody_knows_are_refused(base: BaseModel, tmp_path: Path) -> None:
    case = CASES["llama"]
    folder = write_head(tmp_path, case["config"], tensors_of(case) | {"midlayer.extra": torch.zeros(1)})
    with pytest.raises(LoadError, match=r"a tensor 'midlayer\.extra', which no head of its kind that can be run has"):
        load_head(folder, base)
    with pytest.raises(LoadError, match="is a speculators head of kind 'dflash', which no method reads"):
        load_head(speculators(tmp_path, case, speculators_model_type="dflash"), base)
