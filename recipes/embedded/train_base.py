"""Train the embedded base model, a small Llama, and its tokeniser on GSM8K's training split.

    python -m recipes.embedded.train_base --output build/base

This takes less than an hour on two cores. The run is seeded. Started again with the same arguments, it resumes from
`OUTPUT/state.pt`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from recipes.embedded.gsm8k import Problem, read_split

VOCABULARY = 2_048
MAX_LENGTH = 1_024
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int, special_tokens: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokeniser of up to `vocabulary` tokens. Every digit is a token, which helps arithmetic.

    Args:
        special_tokens: `<|pad|>`, `<|end|>` and those that chats need.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=special_tokens[2:],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_tokenizer(problems: list[Problem]) -> PreTrainedTokenizerFast:
    """Train the embedded base's tokeniser."""
    texts = (text for p in problems for text in (p.question, p.answer))
    fast = train_tokenizer(texts, VOCABULARY, SPECIAL_TOKENS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of 8 layers and width 256 with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> list[list[int]]:
    """Return each problem as the tokens of one chat: the question and the worked solution, each with an end token."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.question}, {"role": "assistant", "content": p.answer}], tokenize=False
        )
        for p in problems
    ]
    return [ids[:MAX_LENGTH] for ids in tokenizer(chats, add_special_tokens=False)["input_ids"]]


def batches(documents: list[list[int]], tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield padded batches `[B, L]` without end, each of about `tokens` positions and documents of similar length.

    The padding is -100.
    """
    epoch = 0
    while True:
        rng = random.Random(f"{seed}/{epoch}")
        # With noise on the lengths, a batch has other documents in each epoch.
        order = sorted(documents, key=lambda ids: len(ids) * rng.uniform(0.9, 1.1))
        groups: list[list[list[int]]] = [[]]
        for ids in order:
            longest = max([len(ids), *map(len, groups[-1])])
            if longest * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(ids)
        rng.shuffle(groups)
        for group in groups:
            length = max(map(len, group))
            yield torch.tensor([ids + [-100] * (length - len(ids)) for ids in group])
        epoch += 1


def loss_of(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token cross-entropy in nats. Padding, -100 in `batch` `[B, L]`, does not count."""
    logits = model(batch.clamp_min(0), attention_mask=(batch >= 0).long(), use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-100)


@torch.no_grad()
def perplexity(model: PreTrainedModel, documents: list[list[int]]) -> float:
    """Return the perplexity per token over whole documents."""
    model.eval()
    total = count = 0.0
    for ids in documents:
        labels = len(ids) - 1
        total += float(loss_of(model, torch.tensor([ids]))) * labels
        count += labels
    model.train()
    return math.exp(total / count)


def fit(
    model: PreTrainedModel,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    documents: list[list[int]],
    args: argparse.Namespace,
) -> None:
    """Train a model for `args.steps` steps, from the last state in `args.output` if there is one.

    Args:
        loss_of: Of a batch of `batches`.
        args: Those that `add_arguments` adds.
    """
    warmup = max(args.steps // 20, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 * (1.02 + 0.98 * math.cos(math.pi * min(step / args.steps, 1.0)))),
    )
    state_file, first = args.output / "state.pt", 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["step"]
    stream = batches(documents, args.tokens_per_step, args.seed)
    for _ in range(first):
        next(stream)
    seen, started = 0, time.monotonic()
    for step in range(first, args.steps):
        batch = next(stream)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += int((batch >= 0).sum())
        if (step + 1) % 20 == 0:
            rate = seen / (time.monotonic() - started)
            print(f"step {step + 1:5d}  loss {loss.item():.3f}  {rate:,.0f} tokens/s", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            temporary = state_file.with_suffix(".tmp")
            torch.save(
                {
                    "step": step + 1,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                },
                temporary,
            )
            temporary.replace(state_file)


def add_arguments(parser: argparse.ArgumentParser, *, steps: int, tokens_per_step: int, learning_rate: float) -> None:
    """Add the arguments of a training run: what it does, and where its output goes."""
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--tokens-per-step", type=int, default=tokens_per_step)
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, steps=2_200, tokens_per_step=2_048, learning_rate=2e-3)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    problems = read_split("base")
    tokenizer = build_tokenizer(problems)
    tokenizer.save_pretrained(args.output)
    model = build_model(tokenizer)
    documents, held_out = encode(tokenizer, problems), encode(tokenizer, read_split("validation"))
    print(f"{model.num_parameters():,} parameters, {sum(map(len, documents)):,} tokens an epoch", flush=True)

    fit(model, partial(loss_of, model), documents, args)
    model.to(torch.bfloat16).save_pretrained(args.output)
    # The weights are rounded to bf16 as they are saved; the perplexity is computed in fp32.
    report = {
        "parameters": model.num_parameters(),
        "steps": args.steps,
        "tokens_per_step": args.tokens_per_step,
        "learning_rate": args.learning_rate,
        "seed": args.seed,
        "validation_perplexity": perplexity(model.float(), held_out),
        "training_perplexity": perplexity(model, documents[: len(held_out)]),
    }
    (args.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
