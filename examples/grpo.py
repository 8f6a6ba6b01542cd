"""GRPO by TRL, whose rollouts a draft head makes: `python -m examples.grpo`, with TRL installed (`pip install trl`)."""

from __future__ import annotations

import sys
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from drafter import SpeculativeLM
from drafter.embedded import EMBEDDED_BASE
from drafter.trl import make_rollout

QUESTIONS = [f"Tom has {number} boxes of 12 pens. How many pens?" for number in range(2, 18)]


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Return the share of digits in each answer: that is soon learned."""
    texts = [chat[0]["content"] for chat in completions]
    return [sum(one.isdigit() for one in text) / max(len(text), 1) for text in texts]


def train(lm: SpeculativeLM, steps: int, folder: str, **settings: Any) -> GRPOTrainer:
    """Train the embedded model for some steps; return the trainer. `lm` gets its weights before each one."""
    settings = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 24, **settings}
    settings |= {"learning_rate": 3e-4, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    config = GRPOConfig(folder, max_steps=steps, bf16=False, use_cpu=True, **settings)
    questions = Dataset.from_list([{"prompt": [{"role": "user", "content": one}]} for one in QUESTIONS])
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_BASE, dtype="float32")
    words = AutoTokenizer.from_pretrained(EMBEDDED_BASE)
    trainer = GRPOTrainer(model, reward, config, questions, processing_class=words, rollout_func=make_rollout(lm))
    trainer.train()
    return trainer


if __name__ == "__main__":
    with SpeculativeLM.from_pretrained(drafter="ctc", num_draft_tokens=7) as engine:
        trained = train(engine, 10, sys.argv[1] if len(sys.argv) > 1 else "out/grpo")
        done = engine.engine.state()
    rewards = [one["reward"] for one in trained.state.log_history if "reward" in one]
    print(f"reward {rewards[0]:.3f} → {rewards[-1]:.3f}; {done.output_tokens / done.row_steps:.2f} tokens a step")
