"""GPU hours of a run, by formula; `README.md` of this folder explains it.

Nothing of it is measured. A decoding step takes as long as its bytes take to be read or its arithmetic to be done,
whichever is longer; training takes as long as its arithmetic. Loading models, starting jobs and waiting are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import yaml

from drafter.engine.config import EngineSettings
from drafter.evaluation.tables import markdown_table
from drafter.heads.checkpoint import HEADS
from drafter.training.settings import TrainingSettings
from pipeline.errors import InputError
from recipes.paper.distillation_prompts import read_prompts
from recipes.paper.head_settings import full_config, head_settings
from recipes.paper.paper_config import HERE, HardwareConfig, PaperConfig, parse_config
from recipes.paper.stage_jobs import evaluation_of

_FORWARD, _BACKWARD = 2, 4
"""Operations of a weight for a position: a product and a sum forwards, and twice that backwards."""


@dataclass(frozen=True)
class Estimate:
    """A stage's estimate.

    Args:
        stage: Its name.
        hours: Hours of one GPU.
        what: What is counted.
    """

    stage: str
    hours: float
    what: str


def estimate(config: PaperConfig) -> list[Estimate]:
    """Return the GPU hours of the stages that need a GPU.

    Raises:
        InputError: The configuration says nothing of the hardware, or a file of prompts cannot be used.
    """
    hardware = config.hardware
    if hardware is None:
        raise InputError("there is nothing to estimate GPU hours for: set hardware, as vicuna-7b.yaml does")
    clock = _Clock(config, hardware)
    written = config.prompts.written
    files = sum(len(read_prompts(file)) for file in config.prompts.files)
    prompts = round(written * hardware.useful_share) + files
    found = []
    if written:
        seconds = clock.texts(written, 0, hardware.question_tokens, _slots(config.questions))
        found.append(("questions", seconds, f"{written:,} × {hardware.question_tokens} tokens", config.questions))
    seconds = clock.texts(prompts, hardware.prompt_tokens, hardware.answer_tokens, _slots(config.answers))
    found.append(("answers", seconds, f"{prompts:,} × {hardware.answer_tokens} tokens", config.answers))
    made = [Estimate(name, seconds * _gpus(settings) / 3600, what) for name, seconds, what, settings in found]
    made += [clock.training(name) for name in config.heads]
    return [*made, clock.evaluation()]


class _Clock:
    """How long things take."""

    def __init__(self, config: PaperConfig, hardware: HardwareConfig) -> None:
        self._config, self._hardware = config, hardware
        self._sizes = config.base.sizes()
        self._weights = self._sizes.weights / self._sizes.itemsize
        self._operations = hardware.teraflops * 1e12 * hardware.arithmetic_share
        self._bytes = hardware.gigabytes_per_second * 1e9 * hardware.bandwidth_share

    def step(self, rows: int, length: float) -> float:
        """Seconds of a plain decoding step: rows of a mean length, each of which gets a token."""
        read = self._sizes.weights + rows * length * self._sizes.kv_per_position
        return max(read / self._bytes, _FORWARD * self._weights * rows / self._operations)

    def texts(self, count: int, prompt: int, tokens: int, rows: int) -> float:
        """Seconds of generating texts plainly, `rows` at a time: their prompts, and a step for each token."""
        reading = _FORWARD * self._weights * count * prompt / self._operations
        return reading + count * tokens / rows * self.step(rows, prompt + tokens / 2)

    def training(self, name: str) -> Estimate:
        """The training of one head.

        The base's forward over all tokens; all of the head's parameters, forwards and backwards, at every token of the
        texts and at every draft position, which is more than it has to do; the frozen LM head at every draft position,
        forwards and to the states.
        """
        config, hardware = self._config, self._hardware
        settings = TrainingSettings(**config.training.get("training", {}))
        texts = settings.steps * settings.texts_per_step
        tokens = texts * (hardware.prompt_tokens + hardware.answer_tokens)
        positions = texts * settings.anchors_per_text * config.depth
        parameters = head_parameters(config, name)
        operations = _FORWARD * self._weights * tokens + (_FORWARD + _BACKWARD) * parameters * (tokens + positions)
        operations += (_FORWARD + _BACKWARD / 2) * self._sizes.vocabulary * self._sizes.hidden * positions
        what = f"{settings.steps:,} steps × {settings.texts_per_step} texts, {parameters:,} parameters"
        return Estimate(f"train-{name}", operations / self._operations / 3600, what)

    def evaluation(self) -> Estimate:
        """The evaluation, each arm at plain decoding's speed, beside plain decoding."""
        hardware, asked = self._hardware, evaluation_of(self._config)
        plan = asked.plan()
        arms = len(self._config.heads) * len(plan.num_draft_tokens) + 1
        tokens = min(hardware.answer_tokens, plan.max_new_tokens)
        prompts = hardware.measured_prompts
        seconds = sum(self.texts(prompts, hardware.prompt_tokens, tokens, rows) for rows in plan.batches)
        seconds *= arms * plan.rounds * len(plan.temperatures)
        what = f"{arms} arms × {prompts} prompts × {tokens} tokens, batches {', '.join(map(str, plan.batches))}"
        return Estimate("evaluate", seconds * (asked.gpus or 1) / 3600, what)


def head_parameters(config: PaperConfig, name: str) -> int:
    """Return the number of a head's parameters. None of them is made."""
    algorithm, fields = head_settings(config, name)
    with torch.device("meta"):
        head = HEADS[algorithm](full_config(config, name, algorithm, fields))
    return sum(parameter.numel() for parameter in head.parameters())


def estimate_table(estimates: list[Estimate]) -> str:
    """Return a table of estimates, with their sum."""
    rows = [{"stage": one.stage, "GPU hours": f"{one.hours:.1f}", "counted": one.what} for one in estimates]
    total = {"stage": "all", "GPU hours": f"{sum(one.hours for one in estimates):.0f}", "counted": ""}
    return markdown_table([*rows, total])


def estimates_page() -> str:
    """Return a page with the estimates of all configurations that name their hardware."""
    parts = [
        "# GPU hours, by formula",
        "`python -m recipes.paper.gpu_hours` writes this page. Nothing of it is measured.",
    ]
    for file in sorted(HERE.glob("*.yaml"), key=lambda file: (len(file.name), file.name)):
        if "hardware" in yaml.safe_load(file.read_text(encoding="utf-8")):
            config = parse_config(["--config", str(file), "--output", "nowhere"], "recipes.paper estimate", "")
            assert config.hardware is not None
            parts += [f"## {config.base.name}, {config.hardware.gpu}", estimate_table(estimate(config))]
    return "\n\n".join(parts) + "\n"


def _slots(settings: Mapping[str, Any]) -> int:
    return int(settings.get("engine", {}).get("max_num_seqs", EngineSettings().max_num_seqs))


def _gpus(settings: Mapping[str, Any]) -> float:
    """GPUs of an engine. Those of one that holds a part of the base each take turns."""
    return float(settings.get("resources", {}).get("gpus_per_actor", 1))


if __name__ == "__main__":
    (HERE / "estimates.md").write_text(estimates_page(), encoding="utf-8")
