from __future__ import annotations

import pytest
import torch

from drafter.base_model import BaseModel
from drafter.ctc.loss import prefix_loss
from drafter.drafters.ctc import CTCDrafter, CTCHead, CTCHeadConfig
from drafter.requests import Request, SamplingParams
from drafter.statistics import mean_acceptance_length, total
from drafter.token_tree import TokenTree
from drafter.training.objectives import base_hidden_states, draft_loss
from drafter.training.simulated_walk import accepted_depths, simulated_beta
from drafter.training.targets import RegeneratedText, draft_batch
from tests.models import random_prompts, run_engine


def new_head(base: BaseModel, **settings: object) -> CTCHead:
    torch.manual_seed(0)
    sizes = {"num_frames": 6, "depth": 4, "num_heads": 2, "intermediate_size": 48, "joint_size": 24}
    return CTCHead(CTCHeadConfig(base.hidden_size, base.vocab_size, **{**sizes, **settings}))  # type: ignore[arg-type]


def random_texts(count: int, length: int = 14) -> list[RegeneratedText]:
    generator = torch.Generator().manual_seed(0)
    return [RegeneratedText(torch.randint(3, 97, (length - i,), generator=generator).tolist(), 3) for i in range(count)]


@pytest.mark.parametrize("settings", [{}, {"loss": "ctc"}, {"label_context": 1}, {"label_context": 2, "band": 3}])
def test_a_head_learns_a_text_by_heart(tiny_base: BaseModel, settings: dict[str, object]) -> None:
    head = new_head(tiny_base, **settings)
    texts = random_texts(2)
    batch = draft_batch(texts, 4, 16)
    before = simulated_beta(head, tiny_base, texts, (8,))[8]
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    losses = []
    for _ in range(120):
        loss = draft_loss(head, tiny_base, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    # Depth 4 bounds a step at five tokens.
    after = simulated_beta(head, tiny_base, texts, (8,))[8]
    assert before < 1.5 < 2.0 < after <= 5.0
    assert head.training


def test_only_the_head_trains(tiny_base: BaseModel) -> None:
    head = new_head(tiny_base, label_context=1)
    draft_loss(head, tiny_base, draft_batch(random_texts(2), 4, 16)).mean().backward()
    assert all(parameter.grad is None for parameter in tiny_base.model.parameters())
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_the_lattice_loss_without_a_joint_is_the_frames_own(tiny_base: BaseModel) -> None:
    """With the joint's output at zero and a band of one, label `u` is said by frame `u`: plain cross-entropy."""
    head = new_head(tiny_base, label_context=1, band=1)
    torch.nn.init.zeros_(head.joint_out.weight)
    batch = draft_batch(random_texts(2), 4, 16)
    hidden = base_hidden_states(tiny_base, batch.tokens)
    states = head.frames_at(tiny_base.embed(batch.tokens), hidden, batch.anchors).flatten(0, 1)
    log_probs = head.log_probs(states, tiny_base.lm_head)[:, :4]
    entropy = -log_probs.gather(2, batch.targets.flatten(0, 1)[..., None])[..., 0]
    weights = (torch.arange(4) < batch.lengths.flatten()[:, None]) * 0.8 ** torch.arange(4)
    expected = (entropy * weights).sum() / weights.sum()
    assert draft_loss(head, tiny_base, batch).mean().item() == pytest.approx(expected.item(), rel=1e-4)


def test_anchors_that_fill_a_row_do_not_count(tiny_base: BaseModel) -> None:
    head = new_head(tiny_base)
    texts = [*random_texts(1, 14), *random_texts(1, 6)]
    together = draft_loss(head, tiny_base, draft_batch(texts, 4, 16))
    apart = [draft_loss(head, tiny_base, draft_batch([text], 4, 16)) for text in texts]
    assert together.total.item() == pytest.approx(sum(part.total.item() for part in apart), rel=1e-4)
    assert together.weight.item() == pytest.approx(sum(part.weight.item() for part in apart))


def test_prefix_loss_is_what_the_plain_head_trains_on(tiny_base: BaseModel) -> None:
    head = new_head(tiny_base, depth_decay=0.5)
    batch = draft_batch(random_texts(1), 4, 16)
    states = head.frames_at(tiny_base.embed(batch.tokens), base_hidden_states(tiny_base, batch.tokens), batch.anchors)
    log_probs = head.log_probs(states[0], tiny_base.lm_head)
    expected = prefix_loss(log_probs, batch.targets[0], batch.lengths[0], 0.5)
    assert draft_loss(head, tiny_base, batch).mean().item() == pytest.approx(expected.mean().item(), rel=1e-5)


def test_accepted_depths_of_a_literal_tree() -> None:
    tree = TokenTree(
        tokens=torch.tensor([[9, 1, 2, 3, 5, -1]]),
        parents=torch.tensor([[0, 0, 1, 0, 2, 0]]),
        depths=torch.tensor([[0, 1, 2, 1, 3, 1]]),
        log_prices=torch.tensor([[0.0, -1.0, -2.0, -3.0, -4.0, -torch.inf]]),
    )
    counts = (0, 1, 2, 3, 4)

    def accepted(targets: list[int], length: int = 3) -> list[int]:
        return accepted_depths(tree, torch.tensor([targets]), torch.tensor([length]), counts)[:, 0].tolist()

    assert accepted([1, 2, 5]) == [0, 1, 2, 2, 3]
    assert accepted([3, 2, 5]) == [0, 0, 0, 1, 1]
    assert accepted([7, 2, 5]) == [0, 0, 0, 0, 0]
    # The text ends after two tokens.
    assert accepted([1, 2, 5], length=2) == [0, 1, 2, 2, 2]


def test_simulated_beta_is_what_decoding_measures(tiny_base: BaseModel) -> None:
    """The engine's β at temperature 0 on the same prompts, the same nodes a step."""
    prompts = random_prompts(6, seed=2)
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True), str(i)) for i, prompt in enumerate(prompts)
    ]
    head = new_head(tiny_base)
    texts = random_texts(4)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    drafter = CTCDrafter(head, tiny_base, tree_size=9)

    def generations() -> list[RegeneratedText]:
        made = run_engine(tiny_base, drafter, requests, slots=2, max_length=64, nodes=8)
        measured.append(mean_acceptance_length(total(one.counts for one in made)))
        return [RegeneratedText(p + m.token_ids, len(p)) for p, m in zip(prompts, made, strict=True)]

    measured: list[float] = []
    texts = generations()
    for _ in range(40):
        draft_loss(head, tiny_base, draft_batch(texts, 4, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert generations() == texts
    assert measured[1] > measured[0]
    assert simulated_beta(head, tiny_base, texts, (8,))[8] == pytest.approx(measured[1], rel=0.02)
