"""TRL's own client of a teacher, which asks for the log-probabilities of whole sequences."""

from __future__ import annotations

import pytest
import torch

from drafter import SpeculativeLM

pytest.importorskip("trl")

from trl.generation.vllm_client import VLLMClient


@pytest.mark.parametrize("chunk_size", [0, 1])
def test_a_teacher_scores_sequences(
    local: str, plain: SpeculativeLM, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.generation.vllm_client.is_vllm_available", lambda: True)  # it talks to a server alone
    client = VLLMClient(base_url=local)
    sequences = [plain.encode(text) for text in ("how many apples does she have", "how many pens", "a a a")]
    lengths = [3, 2, 1]
    found = client.get_sequence_logprobs(sequences, lengths, top_logprobs=3, chunk_size=chunk_size)
    for place, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        with torch.no_grad():
            rows = plain.base.model(torch.tensor([sequence])).logits[0, length - 1 : -1].log_softmax(-1)
        best = rows.topk(3).values
        assert torch.tensor(found["logprobs"][place]).allclose(best, atol=1e-4)
        tokens = torch.tensor(sequence[length:])[:, None]
        assert torch.tensor(found["actual_logprobs"][place]).allclose(rows.gather(1, tokens), atol=1e-4)
        assert found["actual_token_ids"][place] == tokens.tolist()
