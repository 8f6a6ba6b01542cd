from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafter.errors import RequestError
from drafter.requests import SamplingParams
from drafter.tree.token_tree import TokenTree, root_only
from drafter.tree.trie import from_nodes
from drafter.verifiers.choices import SamplingMode, SamplingTable, choose, keep_probable, keep_ranked
from drafter.verifiers.keyed_draw import draw, seed_key
from drafter.verifiers.penalties import History, penalise

CPU = torch.device("cpu")


def table_of(params: list[SamplingParams], prompt: int = 1) -> SamplingTable:
    table = SamplingTable.empty(len(params), CPU)
    for slot, one in enumerate(params):
        table.set(slot, one, prompt)
    return table


def history_of(texts: list[list[int]], tree: TokenTree) -> History:
    """Trees on texts of which each ends with its tree's root and, if they are ragged, with padding."""
    lengths = torch.tensor([len(text) - 1 for text in texts])
    width = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    return History(tokens, lengths, tree.tokens, tree.depths, tree.ancestors())


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    penalty=st.sampled_from([0.7, 1.0, 1.3]),
)
def test_filters_keep_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 31, generator=generator).double() * 3
    context = torch.randint(0, 31, (1, 6), generator=generator)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    processors.append(TopPLogitsWarper(top_p))
    processors.append(MinPLogitsWarper(min_p))
    expected = processors(context, logits)

    none = torch.zeros(1)
    history = history_of(context.tolist(), root_only(context[:, -1]))
    penalised = penalise(logits[None], history, torch.tensor([0]), torch.tensor([penalty]), none, none)[0]
    scores = penalised / temperature
    ours = keep_ranked(scores, torch.tensor([top_k]), torch.tensor([top_p]).double())
    ours = keep_probable(ours, torch.tensor([min_p]).double())
    assert torch.equal(ours.isfinite(), expected.isfinite())
    assert torch.allclose(ours.softmax(-1), expected.softmax(-1))


def test_counts_follow_the_path_to_the_node() -> None:
    # Row text 1 2 2 (and a stale 5), tree root 4 with children 2 and 3, and 2 below 2.
    tree = TokenTree(
        torch.tensor([[4, 2, 3, 2]]), torch.tensor([[0, 0, 0, 1]]), torch.tensor([[0, 1, 1, 2]]), torch.zeros(1, 4)
    )
    history = History(torch.tensor([[1, 2, 2, 4, 5]]), torch.tensor([3]), tree.tokens, tree.depths, tree.ancestors())
    in_text, at_nodes = history.counts(torch.tensor([0]), 6)
    assert in_text.tolist() == [[0, 1, 2, 0, 0, 0]]
    # At each node: how often the tokens of the four nodes, 4 2 3 2, came before its choice.
    assert at_nodes.tolist() == [[[1, 2, 0, 2], [1, 3, 0, 3], [1, 2, 1, 2], [1, 4, 0, 4]]]
    # From the second 2 on.
    assert history.counts(torch.tensor([2]), 6)[0].tolist() == [[0, 0, 1, 0, 0, 0]]
    # The root is the prompt's last token: the output begins below it.
    in_text, at_nodes = history.counts(torch.tensor([4]), 6)
    assert in_text.sum() == 0
    assert at_nodes.tolist() == [[[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 2, 0, 2]]]


def test_penalties_and_biases_are_openais() -> None:
    logits = torch.tensor([[[2.0, -1.0, 0.5, 0.25, 3.0]]])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: -2.0, 0: 1.0})
    # Prompt 4 4, output 2 0 2.
    history = history_of([[4, 4, 2, 0, 2]], root_only(torch.tensor([2])))
    none = torch.ones(1)
    settings = torch.tensor([params.frequency_penalty]), torch.tensor([params.presence_penalty])
    found = penalise(logits.double(), history, torch.tensor([2]), none, *settings)
    assert found[0, 0].tolist() == [2.0 - 0.75, -1.0, 0.5 - 1.0, 0.25, 3.0]
    # 2 + 1 - 0.75 against 3 - 2.
    assert choose(logits, table_of([params], prompt=2), SamplingMode.of([params]), None, history).item() == 0


PENALTIES = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "temperature": 1.0},
    {"repetition_penalty": 1.4, "presence_penalty": -1.0, "frequency_penalty": 0.6, "temperature": 0.8, "top_k": 7},
    {"logit_bias": {3: 2.5, 5: -100.0}, "frequency_penalty": 1.1, "temperature": 1.2, "top_p": 0.9},
    {},
]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000), lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), nodes=st.integers(1, 9)
)
def test_choices_in_a_tree_are_those_of_plain_decoding(seed: int, lengths: list[int], nodes: int) -> None:
    """Whatever the tree, the choice at a node is made as if the way to it were the row's text and nothing drafted."""
    generator = torch.Generator().manual_seed(seed)
    rows, vocabulary = len(lengths), 8  # so that tokens repeat

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    text = integers(vocabulary, rows, 12)
    known = torch.tensor(lengths)
    parents = torch.stack([integers(i + 1, rows) - 1 for i in range(nodes)], 1)
    depths = torch.ones(rows, nodes, dtype=torch.long)
    for node in range(nodes):
        above = depths.gather(1, parents[:, node : node + 1].clamp_min(0))[:, 0]
        depths[:, node] = torch.where(parents[:, node] >= 0, above, 0) + 1
    pending = text.gather(1, known[:, None])[:, 0]
    tree = from_nodes(pending, integers(vocabulary, rows, nodes), parents, depths, -depths.float(), nodes + 2)

    params = [SamplingParams(seed=row, **PENALTIES[(seed + row) % len(PENALTIES)]) for row in range(rows)]  # type: ignore[arg-type]
    table, mode = SamplingTable.empty(rows, CPU), SamplingMode.of(params)
    for row, one in enumerate(params):
        table.set(row, one, lengths[row] + 1 - int(integers(lengths[row] + 1, 1)))
    logits = torch.randn(rows, tree.size, vocabulary, generator=generator)
    history = History(text, known, tree.tokens, tree.depths, tree.ancestors())
    found = choose(logits, table, mode, known[:, None] + tree.depths + 1, history)
    paths = tree.paths(nodes)
    for node in range(tree.size - 1):  # the last one is padding
        spelled = [
            [*text[r, : lengths[r] + 1].tolist(), *(t for t in paths[r, node].tolist() if t >= 0)] for r in range(rows)
        ]
        ends = torch.tensor([len(one) for one in spelled])
        alone = root_only(torch.tensor([one[-1] for one in spelled]))
        expected = choose(logits[:, node : node + 1], table, mode, ends[:, None], history_of(spelled, alone))
        assert torch.equal(found[:, node : node + 1], expected)


def test_greedy_rows_and_random_rows_share_a_batch() -> None:
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=5)]
    logits = torch.zeros(2, 1, 10)
    logits[:, :, 7] = 0.1
    choices = choose(logits, table_of(params), SamplingMode.of(params), torch.tensor([[1], [1]]), None)
    # The output's first token, after a prompt of one.
    scores = (logits[1].double() - logits[1].amax()).contiguous()
    expected = draw(scores, torch.tensor([seed_key(5)]), torch.tensor([0]))
    assert choices.tolist() == [[7], [expected.item()]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1, top_k=9, top_p=0.95),
    ],
)
def test_choices_have_the_exact_distribution(params: SamplingParams) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4)) * 1.5
    draws = 20_000
    table = table_of([params])
    mode = SamplingMode.of([params])
    positions = torch.arange(1, draws + 1)[None]
    chosen = choose(logits.expand(1, draws, -1), table, mode, positions, None)[0]

    exact = (logits.double() / params.temperature).softmax(-1).numpy()
    order = np.argsort(-exact)
    keep = np.ones(12, dtype=bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    ranked = np.where(keep, exact, 0)[order] / exact[keep].sum()
    keep[order[np.cumsum(ranked) - ranked >= params.top_p]] = False
    keep &= exact >= params.min_p * exact.max()
    exact = np.where(keep, exact, 0) / exact[keep].sum()
    counts = np.bincount(chosen.numpy(), minlength=12)
    assert counts[~keep].sum() == 0
    assert chisquare(counts[keep], draws * exact[keep]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2.5),
        ("min_p", float("inf")),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: "much"}),
        ("logit_bias", {"five": 1.0}),
        ("logit_bias", {-5: 1.0}),
        ("logit_bias", [5, 6]),
        ("logit_bias", 5),
        ("logprobs", 21),
        ("logprobs", True),
        ("max_new_tokens", 0),
        ("seed", -1),
        ("stop", "end"),
        ("stop", ("",)),
        ("ignore_eos", "yes"),
    ],
)
def test_bad_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_biases_are_kept_as_pairs_however_they_are_given() -> None:
    pairs = ((3, -1.0), (12, 0.5))
    for spelled in ({12: 0.5, 3: -1.0}, {"12": 0.5, "3": -1.0}, [[12, 0.5], [3, -1.0]], pairs):
        params = SamplingParams(logit_bias=spelled)  # type: ignore[arg-type]
        assert params.logit_bias == pairs
        assert hash(params) == hash(SamplingParams(logit_bias=pairs))


def test_a_slots_biases_do_not_outlive_its_request() -> None:
    table = SamplingTable.empty(2, CPU)
    biased, free = SamplingParams(logit_bias={2: 5.0, 3: 4.0}), SamplingParams(logit_bias={1: 1.0})
    table.set(0, biased, 1)
    table.set(1, free, 1)
    logits = torch.zeros(2, 1, 5)
    mode = SamplingMode.of([biased, free])
    assert choose(logits, table, mode, None, None).tolist() == [[2], [1]]
    table.move(1, 0)
    assert choose(logits, table, mode, None, None).tolist() == [[1], [1]]


def test_extreme_settings_still_choose_a_token() -> None:
    logits = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(2))
    best = int(logits.argmax())
    for setting in ({"temperature": 1e-320}, {"temperature": 1e308, "min_p": 1.0}, {"temperature": 1.0, "top_k": 1}):
        params = SamplingParams(seed=7, **setting)  # type: ignore[arg-type]
        table, mode = table_of([params]), SamplingMode.of([params])
        chosen = choose(logits, table, mode, torch.tensor([[1]]), None)
        assert chosen.item() == best or setting["temperature"] == 1e308
    everything = SamplingParams(temperature=1.0, top_k=10**30)
    assert choose(logits, table_of([everything]), SamplingMode.of([everything]), torch.tensor([[1]]), None).item() < 12
