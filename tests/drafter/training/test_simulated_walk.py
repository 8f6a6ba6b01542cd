from __future__ import annotations

import pytest
import torch

from drafter.requests import Request, SamplingParams
from drafter.statistics import mean_acceptance_length, total
from drafter.target_model.model import BaseModel
from drafter.training.loop import TorchOptimiser, TrainingStep
from drafter.training.settings import TrainingSettings
from drafter.training.targets import RegeneratedText, accepted_depths, draft_batch, simulated_beta
from drafter.tree.token_tree import TokenTree
from tests.support.heads import DEPTH, untrained_head
from tests.support.models import random_prompts, run_engine


def test_accepted_depths_of_a_literal_tree() -> None:
    tree = TokenTree(
        tokens=torch.tensor([[9, 1, 2, 3, 5, -1]]),
        parents=torch.tensor([[0, 0, 1, 0, 2, 0]]),
        depths=torch.tensor([[0, 1, 2, 1, 3, 1]]),
        log_probs=torch.tensor([[0.0, -1.0, -2.0, -3.0, -4.0, -torch.inf]]),
    )
    counts = (0, 1, 2, 3, 4)

    def accepted(targets: list[int], length: int = 3) -> list[int]:
        return accepted_depths(tree, torch.tensor([targets]), torch.tensor([length]), counts)[:, 0].tolist()

    assert accepted([1, 2, 5]) == [0, 1, 2, 2, 3]
    assert accepted([3, 2, 5]) == [0, 0, 0, 1, 1]
    assert accepted([7, 2, 5]) == [0, 0, 0, 0, 0]
    # The text ends after two tokens.
    assert accepted([1, 2, 5], length=2) == [0, 1, 2, 2, 2]


@pytest.mark.parametrize("kind", ["ctc", "context 2", "hydra"])
def test_simulated_beta_is_what_decoding_measures(tiny_base: BaseModel, kind: str) -> None:
    """It equals the engine's β at temperature 0 on the same prompts, with as many nodes per step."""
    prompts = random_prompts(6, seed=2)
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True), str(i)) for i, prompt in enumerate(prompts)
    ]
    head = untrained_head(tiny_base, kind)
    measured: list[float] = []

    def generations() -> list[RegeneratedText]:
        drafter = head.drafter(tiny_base, 8)
        made = run_engine(tiny_base, drafter, requests, max_num_seqs=2, max_model_len=64, num_draft_tokens=8)
        measured.append(mean_acceptance_length(total(one.counts for one in made)))
        return [RegeneratedText(p + m.token_ids, len(p)) for p, m in zip(prompts, made, strict=True)]

    texts = generations()
    settings = TrainingSettings(steps=40, learning_rate=0.02, warmup_steps=5)
    optimiser = TorchOptimiser(TrainingStep(tiny_base, head, settings), settings)
    for _ in range(settings.steps):
        optimiser.update([draft_batch(texts, DEPTH, 32)])
    assert generations() == texts
    assert measured[1] > measured[0]
    # On a CPU decoding leaves out improbable prefixes of a lattice.
    tolerance = 0.05 if kind == "context 2" else 0.02
    assert simulated_beta(head, tiny_base, texts, (8,))[8] == pytest.approx(measured[1], rel=tolerance)
