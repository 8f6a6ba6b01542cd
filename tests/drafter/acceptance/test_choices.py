from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter.acceptance.choices import NodeChoices, RowSampling, SamplingMode, SamplingTable
from drafter.acceptance.limits import Limits
from drafter.acceptance.sampling import History, draw, penalise, seed_key
from drafter.errors import RequestError
from drafter.requests import SamplingParams
from drafter.tree.token_tree import TokenTree, from_nodes, root_only
from tests.support.models import SpellingTokenizer
from tests.support.properties import examples

CPU = torch.device("cpu")
EOS, VOCABULARY = (0,), 8


def sampling_of(params: list[SamplingParams], texts: list[list[int]], prompts: list[int]) -> RowSampling:
    """Rows of which each text ends with its pending token, and the first so many tokens are its prompt."""
    table = SamplingTable.empty(len(params), CPU)
    for slot, (one, prompt) in enumerate(zip(params, prompts, strict=True)):
        table.set(slot, one, prompt, Limits.of(one, EOS, SpellingTokenizer()), VOCABULARY)
    width = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    lengths = torch.tensor([len(text) - 1 for text in texts])
    return RowSampling(table, slice(0, len(params)), SamplingMode.of(params), tokens, lengths)


def choose(logits: torch.Tensor, tree: TokenTree, sampling: RowSampling) -> torch.Tensor:
    """The choice at every node, `[B, N]`."""
    choices = NodeChoices(logits, tree, tree.ancestors(), sampling)
    rows = torch.arange(len(logits))
    return torch.stack([choices.at(rows, torch.full_like(rows, node)) for node in range(tree.size)], 1)


def choose_first(logits: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    """The first token of each output, after a prompt of one token."""
    sampling = sampling_of(params, [[0]] * len(params), [1] * len(params))
    return choose(logits[:, None], root_only(torch.zeros(len(params), dtype=torch.long)), sampling)[:, 0].tolist()


def test_counts_follow_the_path_to_the_node() -> None:
    # Row text 1 2 2 (and a stale 5), tree root 4 with children 2 and 3, and 2 below 2.
    tree = TokenTree(
        torch.tensor([[4, 2, 3, 2]]), torch.tensor([[0, 0, 0, 1]]), torch.tensor([[0, 1, 1, 2]]), torch.zeros(1, 4)
    )
    tokens, lengths, prompt = torch.tensor([[1, 2, 2, 4, 5]]), torch.tensor([3]), torch.tensor([2])
    history = History(tokens, lengths, prompt, tree, tree.ancestors(), 6)
    row, before = torch.tensor([0]), [history.before(torch.tensor([0]), torch.tensor([node])) for node in range(4)]
    assert torch.cat([seen for seen, _ in before]).tolist() == [
        [0, 1, 2, 0, 1, 0],
        [0, 1, 3, 0, 1, 0],
        [0, 1, 2, 1, 1, 0],
        [0, 1, 4, 0, 1, 0],
    ]
    # The output begins with the second 2.
    assert torch.cat([said for _, said in before]).tolist() == [
        [0, 0, 1, 0, 1, 0],
        [0, 0, 2, 0, 1, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 3, 0, 1, 0],
    ]
    # The root is the prompt's last token: the output begins below it.
    history = History(tokens, lengths, torch.tensor([4]), tree, tree.ancestors(), 6)
    assert history.before(row, torch.tensor([0]))[1].sum() == 0
    assert history.before(row, torch.tensor([3]))[1].tolist() == [[0, 0, 2, 0, 0, 0]]


def test_penalties_and_biases_are_openais() -> None:
    logits = torch.tensor([[[2.0, -1.0, 0.5, 0.25, 3.0]]])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: -2.0, 0: 1.0})
    # Prompt 4 4, output 2 0 2.
    seen, said = torch.tensor([[1.0, 0.0, 2.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 2.0, 0.0, 0.0]])
    settings = torch.ones(1), torch.tensor([params.frequency_penalty]), torch.tensor([params.presence_penalty])
    found = penalise(logits[:, 0].double(), seen, said, *settings)
    assert found[0].tolist() == [2.0 - 0.75, -1.0, 0.5 - 1.0, 0.25, 3.0]
    # 2 + 1 - 0.75 against 3 - 2.
    sampling = sampling_of([params], [[4, 4, 2, 0, 2]], [2])
    assert choose(logits, root_only(torch.tensor([2])), sampling).item() == 0


@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.sampled_from([0.0, 0.05, 0.5, 1.0]))
def test_masks_applied_everywhere_at_once_choose_as_node_by_node(seed: int, vocabulary: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    # The nodes' tokens do not matter.
    tree = TokenTree(*(torch.tensor([part, part]) for part in ([1, 2, 3], [0, 0, 0], [0, 1, 1], [0.0, -1.0, -2.0])))
    # Few different values, so that several tokens are the likeliest.
    logits = torch.randint(0, 3, (2, 3, vocabulary), generator=generator).float()
    may_follow = torch.rand(2, 3, vocabulary, generator=generator) < share
    allowed = packed(may_follow)
    sampling = sampling_of([SamplingParams()] * 2, [[0], [0]], [1, 1])
    choices = NodeChoices(logits, tree, tree.ancestors(), sampling, allowed)
    assert choices.plain
    found, sound = choices.everywhere()
    rows = torch.arange(2)
    expected = [choices.at(rows, torch.full_like(rows, node)) for node in range(3)]
    assert torch.equal(found, torch.stack(expected, 1))
    assert sound.all()
    assert (may_follow.gather(2, found[..., None])[..., 0] | ~may_follow.any(2)).all()


def test_a_mask_does_not_hide_what_is_not_finite() -> None:
    logits = torch.tensor([[[0.0, torch.nan, 1.0]], [[2.0, 0.0, 1.0]]])
    tree = root_only(torch.tensor([0, 0]))
    allowed = packed(torch.tensor([[[True, False, True]], [[False, False, True]]]))
    sampling = sampling_of([SamplingParams()] * 2, [[0], [0]], [1, 1])
    found, sound = NodeChoices(logits, tree, tree.ancestors(), sampling, allowed).everywhere()
    assert sound.tolist() == [False, True]
    assert found[1].tolist() == [2]


def packed(may_follow: torch.Tensor) -> torch.Tensor:
    """Masks `[..., ceil(V / 32)]` of `[..., V]` bool."""
    padded = torch.nn.functional.pad(may_follow, (0, -may_follow.shape[-1] % 32))
    return torch.from_numpy(np.packbits(padded.numpy(), axis=-1, bitorder="little").view(np.int32))


PENALTIES = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "temperature": 1.0},
    {"repetition_penalty": 1.4, "presence_penalty": -1.0, "frequency_penalty": 0.6, "temperature": 0.8, "top_k": 7},
    {"logit_bias": {3: 2.5, 5: -100.0}, "frequency_penalty": 1.1, "temperature": 1.2, "top_p": 0.9},
    {"min_tokens": 5, "stop_token_ids": [1, 2]},
    {"min_tokens": 3, "temperature": 1.0, "top_p": 0.7, "allowed_token_ids": [0, 2, 3, 5, 6]},
    {"bad_words": ["3", "1 2", "2 2", "4 1 4", "5 6 5 6"], "frequency_penalty": 0.3},
    {"bad_words": ["7 7"], "allowed_token_ids": [6, 7], "temperature": 2.0},
    {},
]


@examples(120)
@given(
    seed=st.integers(0, 10_000), lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), nodes=st.integers(1, 9)
)
def test_choices_in_a_tree_are_those_of_plain_decoding(seed: int, lengths: list[int], nodes: int) -> None:
    """Whatever the tree, the choice at a node is made as if the way to it were the row's text and nothing drafted."""
    generator = torch.Generator().manual_seed(seed)
    rows, vocabulary = len(lengths), VOCABULARY  # few, so that tokens repeat

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
    prompts = [length + 1 - int(integers(length + 1, 1)) for length in lengths]
    logits = torch.randn(rows, tree.size, vocabulary, generator=generator)
    texts = [text[row, : lengths[row] + 1].tolist() for row in range(rows)]
    found = choose(logits, tree, sampling_of(params, texts, prompts))
    paths = tree.paths(nodes)
    for node in range(tree.size - 1):  # the last one is padding
        spelled = [[*texts[r], *(t for t in paths[r, node].tolist() if t >= 0)] for r in range(rows)]
        alone = root_only(torch.tensor([one[-1] for one in spelled]))
        expected = choose(logits[:, node : node + 1], alone, sampling_of(params, spelled, prompts))
        assert torch.equal(found[:, node : node + 1], expected)
        for row, (one, text_and_path) in enumerate(zip(params, spelled, strict=True)):
            limits = Limits.of(one, EOS, SpellingTokenizer())
            said = [*text_and_path[prompts[row] :], int(expected[row])]
            assert limits is None or limits.permits(said)


def test_greedy_rows_and_random_rows_share_a_batch() -> None:
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=5)]
    logits = torch.zeros(2, 10)
    logits[:, 7] = 0.1
    scores = (logits[1:].double() - logits[1].amax()).contiguous()
    expected = draw(scores, torch.tensor([seed_key(5)]), torch.tensor([0]))
    assert choose_first(logits, params) == [7, expected.item()]


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
    from scipy.stats import chisquare

    logits = torch.randn(12, generator=torch.Generator().manual_seed(4)) * 1.5
    draws = 5_000
    # A row for each place of one output.
    sampling = replace(sampling_of([params] * draws, [[0]] * draws, [1] * draws), lengths=torch.arange(draws))
    chosen = choose(logits.expand(draws, 1, -1), root_only(torch.zeros(draws, dtype=torch.long)), sampling)[:, 0]

    own = params.over()
    exact = (logits.double() / own.temperature).softmax(-1).numpy()
    order = np.argsort(-exact)
    keep = np.ones(12, dtype=bool)
    if own.top_k:
        keep[order[own.top_k :]] = False
    ranked = np.where(keep, exact, 0)[order] / exact[keep].sum()
    keep[order[np.cumsum(ranked) - ranked >= own.top_p]] = False
    keep &= exact >= own.min_p * exact.max()
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
    biased, free = SamplingParams(logit_bias={2: 5.0, 3: 4.0}), SamplingParams(logit_bias={1: 1.0})
    sampling = sampling_of([biased, free], [[0], [0]], [1, 1])
    logits, tree = torch.zeros(2, 1, 5), root_only(torch.tensor([0, 0]))
    assert choose(logits, tree, sampling).tolist() == [[2], [1]]
    sampling.table.move(1, 0)
    assert choose(logits, tree, sampling).tolist() == [[1], [1]]


def test_extreme_settings_still_choose_a_token() -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(2))
    best = int(logits.argmax())
    for setting in ({"temperature": 1e-320}, {"temperature": 1e308, "min_p": 1.0}, {"temperature": 1.0, "top_k": 1}):
        (chosen,) = choose_first(logits, [SamplingParams(seed=7, **setting)])  # type: ignore[arg-type]
        assert chosen == best or setting["temperature"] == 1e308
    assert choose_first(logits, [SamplingParams(temperature=1.0, top_k=10**30)])[0] < 12
