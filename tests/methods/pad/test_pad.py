from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.acceptance.choices import RowSampling, SamplingMode, SamplingTable
from drafter.acceptance.contract import Verified, make_verifier
from drafter.acceptance.settings import VerifierSettings
from drafter.drafters.contract import PlainDecoding
from drafter.errors import LoadError
from drafter.methods.pad.method import (
    BaseOfClassifier,
    PadVerifier,
    PivotClassifier,
    PivotFeatures,
    load_classifier,
    save_classifier,
)
from drafter.requests import Request, SamplingParams
from drafter.target_model.model import BaseModel
from drafter.tree.token_tree import TokenTree
from tests.drafter.acceptance.test_contract import tree_of
from tests.support.models import AdversarialDrafter, random_model, run_engine, tokens_of
from tests.support.properties import examples

WIDTH, VOCABULARY = 4, 6


def classifier_folder(folder: Path, base: BaseOfClassifier, width: int, seed: int = 0) -> Path:
    """A classifier of random weights, large enough to be of all opinions."""
    torch.manual_seed(seed)
    classifier = PivotClassifier(width)
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.normal_(0, 0.6)
    save_classifier(classifier, base, {}, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier_folder(tmp_path_factory.mktemp("pad"), BaseOfClassifier("none", "v2-0", 0), WIDTH)


def row_of(params: SamplingParams) -> RowSampling:
    table = SamplingTable.empty(1, torch.device("cpu"))
    table.set(0, params, 1)
    tokens, lengths = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, dtype=torch.long)
    return RowSampling(table, slice(0, 1), SamplingMode.of([params]), tokens, lengths)


def verified(tree: TokenTree, logits: torch.Tensor, read: torch.Tensor) -> Verified:
    return Verified(tree, tree.ancestors(), int(tree.depths.max()), logits, torch.zeros(1, tree.size, 0), read)


def by_the_paper(folder: Path, tokens: list[int], logits: torch.Tensor, read: torch.Tensor, sigma: float) -> list[int]:
    """The tokens that a chain of drafts gives, place by place and layer by layer as in the paper."""
    weights = load_classifier(folder)[0].state_dict()

    def dense(name: str, values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = weights[f"{name}.weight"] @ values + weights[f"{name}.bias"]
        return made

    said: list[int] = []
    for place, token in enumerate(tokens):
        p = torch.softmax(logits[place].double(), 0)
        entropy = -sum(float(one) * math.log(float(one)) for one in p if one > 0)
        scalars = torch.tensor([entropy, float(p[token])])
        first = torch.cat([dense("of_hidden", read[place + 1]).relu(), dense("of_scalars", scalars).relu()])
        pivot = float(torch.softmax(dense("out", dense("joined", first).relu()), 0)[1])
        exact = token == int(p.argmax())
        if not ((exact or pivot <= sigma) and float(p[token]) >= 1e-4):
            return [*said, int(p.argmax())]
        said.append(token)
    return [*said, int(logits[len(tokens)].argmax())]


CHAINS = st.tuples(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))


@examples(80)
@given(chain=CHAINS)
def test_a_chain_gives_the_tokens_of_the_paper(chain: tuple[int, int, float], folder: Path) -> None:
    seed, length, sigma = chain
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (length,), generator=random).tolist()
    logits = 4 * torch.randn(length + 1, VOCABULARY, generator=random)
    read = torch.randn(length + 1, WIDTH, generator=random)
    tree = tree_of([0, *tokens], [0, *range(length)])
    step = PadVerifier(folder, sigma).accept(verified(tree, logits[None], read[None]), row_of(SamplingParams()))
    count = int(step.count)
    assert step.tokens[0, : count + 1].tolist() == by_the_paper(folder, tokens, logits, read, sigma)
    assert step.lenient is not None
    marked = step.lenient[0].nonzero()[:, 0].tolist()
    assert marked == [place for place in range(count) if tokens[place] != int(logits[place].argmax())]


@examples(60)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.0, 0.8]))
def test_a_larger_sigma_never_accepts_a_shorter_path(seed: int, temperature: float, folder: Path) -> None:
    random = torch.Generator().manual_seed(seed)
    parents = [0, *(int(torch.randint(0, node, (1,), generator=random)) for node in range(1, 8))]
    tree = tree_of(torch.randint(0, VOCABULARY, (8,), generator=random).tolist(), parents)
    base = verified(
        tree, 3 * torch.randn(1, 8, VOCABULARY, generator=random), torch.randn(1, 8, WIDTH, generator=random)
    )
    row = row_of(SamplingParams(temperature=temperature, seed=seed))
    counts = [int(PadVerifier(folder, sigma).accept(base, row).count) for sigma in (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1)]
    assert counts == sorted(counts)


def test_the_widths_are_the_published_ones() -> None:
    classifier = PivotClassifier(576)
    shapes = [tuple(one.shape) for one in classifier.parameters() if one.dim() == 2]
    assert shapes == [(64, 576), (8, 2), (128, 72), (2, 128)]


def test_inputs_are_standardised_by_what_was_labelled() -> None:
    torch.manual_seed(0)
    features = PivotFeatures(7 + 30 * torch.randn(50, WIDTH), 2 * torch.rand(50), torch.rand(50))
    classifier = PivotClassifier(WIDTH)
    classifier.standardise(features)
    moved = PivotFeatures(features.hidden * 9 - 4, features.entropy * 3 + 1, features.probability)
    other = PivotClassifier(WIDTH)
    other.load_state_dict(classifier.state_dict())
    other.standardise(moved)
    torch.testing.assert_close(classifier(features), other(moved), rtol=1e-3, atol=1e-4)


def test_what_a_row_forbids_is_never_accepted(folder: Path) -> None:
    tree = tree_of([0, 1], [0, 0])
    logits = torch.tensor([[[2.0, 1.9, 0, 0, 0, 0]] * 2])
    base = verified(tree, logits, torch.zeros(1, 2, WIDTH))
    everything = PadVerifier(folder, 1.0)
    assert everything.accept(base, row_of(SamplingParams())).count.tolist() == [1]
    for forbidding in (SamplingParams(logit_bias={1: -100.0}), SamplingParams(temperature=1.0, top_k=1)):
        assert everything.accept(base, row_of(forbidding)).count.tolist() == [0]
    improbable = verified(tree, torch.tensor([[[20.0, 0, 0, 0, 0, 0]] * 2]), torch.zeros(1, 2, WIDTH))
    assert everything.accept(improbable, row_of(SamplingParams())).count.tolist() == [0]


def test_sigma_zero_gives_the_tokens_of_plain_decoding(tiny_base: BaseModel, tmp_path: Path) -> None:
    of_base = BaseOfClassifier(tiny_base.name, tiny_base.fingerprint, 0)
    mine = classifier_folder(tmp_path / "mine", of_base, tiny_base.hidden_size)
    requests = [
        Request([5, 6, 7 + row], SamplingParams(20, temperature=row % 2, seed=row, ignore_eos=True)) for row in range(6)
    ]
    expected = tokens_of(run_engine(tiny_base, PlainDecoding(), requests))
    for sigma in (0.0, 1.0):
        verifier = PadVerifier(mine, sigma)
        found = run_engine(
            tiny_base, AdversarialDrafter(1), requests, verifier=verifier, num_draft_tokens=8, max_num_seqs=3
        )
        assert all(not one.lossless and one.verifier == "pad" for one in found)
        assert (tokens_of(found) == expected) == (sigma == 0)
        assert any(one.lenient for one in found) == (sigma == 1)


def test_hidden_states_are_of_the_nodes_whatever_the_drafter_reads(tiny_base: BaseModel, tmp_path: Path) -> None:
    """The same drafts, once by a drafter that reads hidden states itself."""

    class Reading(AdversarialDrafter):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.spec = type(self.spec)(self.spec.max_nodes, self.spec.max_depth, hidden_layers=(-1, 0))

    of_base = BaseOfClassifier(tiny_base.name, tiny_base.fingerprint, 1)
    mine = classifier_folder(tmp_path / "mine", of_base, tiny_base.hidden_size, seed=3)
    requests = [Request([5, 6, 7 + row], SamplingParams(16, ignore_eos=True)) for row in range(3)]
    found = [
        run_engine(tiny_base, drafter, requests, verifier=PadVerifier(mine, 0.4), num_draft_tokens=8, max_num_seqs=3)
        for drafter in (AdversarialDrafter(2), Reading(2))
    ]
    assert tokens_of(found[0]) == tokens_of(found[1])
    assert any(one.lenient for one in found[0])


def test_another_base_is_refused_with_the_reason(tiny_base: BaseModel, tmp_path: Path) -> None:
    mine = classifier_folder(
        tmp_path / "mine", BaseOfClassifier(tiny_base.name, tiny_base.fingerprint, 0), tiny_base.hidden_size
    )
    other = BaseModel(random_model("llama", seed=9), "another")
    with pytest.raises(
        LoadError, match=r"made for another target model: for .*, not for another \(v2-.*: make one for"
    ):
        run_engine(other, AdversarialDrafter(1), [], verifier=PadVerifier(mine))


def test_what_is_no_classifier_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"needs a classifier: make one with python -m recipes.pad"):
        make_verifier(VerifierSettings("pad"))
    with pytest.raises(LoadError, match=r"is not a folder with config\.json and model\.safetensors"):
        make_verifier(VerifierSettings("pad", {"classifier": str(tmp_path)}))
    with pytest.raises(LoadError, match=r"verifier pad: sigma must be between 0 and 1, not 1.5"):
        make_verifier(VerifierSettings("pad", {"classifier": str(folder), "sigma": 1.5}))
    damaged = classifier_folder(tmp_path / "damaged", BaseOfClassifier("none", "v2-0", 0), WIDTH)
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "hidden_size": 5}))
    with pytest.raises(LoadError, match=r"is damaged: RuntimeError: .*run python -m recipes\.pad again"):
        PadVerifier(damaged)
