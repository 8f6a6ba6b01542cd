"""Plan of an evaluation: the arms to compare, and the settings."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from drafter.heads.config import Tree

Nodes = int | Literal["auto"]


@dataclass(frozen=True)
class Arm:
    """One way to decode.

    Args:
        drafter: Name of a drafter as `load_drafter` takes it; `none` is plain decoding.
        tree: Shape of its trees; None for plain decoding.
        nodes: Draft tokens of a step; `auto` adapts to the machine; None for plain decoding.
    """

    drafter: str
    tree: Tree | None = None
    nodes: Nodes | None = None

    @property
    def method(self) -> str:
        """Name of the drafter for tables and plots, without folders.

        A training job has its head in a folder `head`, so the name is that of the job's output.
        """
        if self.tree is None:
            return "plain decoding" if self.drafter == "none" else self.drafter
        return re.sub(r"[^:>+]*/", "", re.sub(r"(?<=[^:>+/])/head(?=/*(?:[>+]|$))", "", self.drafter).rstrip("/"))


TRANSFORMERS = Arm("transformers.generate")
PLAIN = Arm("none")


@dataclass(frozen=True)
class Plan:
    """Every drafter with every tree and number of draft tokens, at every batch size and temperature.

    Args:
        drafters: Names as `load_drafter` takes them.
        trees: Shapes of trees. A drafter that has no such tree is skipped there, with the reason.
        num_draft_tokens: Numbers of draft tokens of a step.
        batches: Numbers of requests decoded together.
        temperatures: Sampling temperatures.
        samples: Answers to each question, each with its own seed, one after another.
        rounds: Number of timed rounds.
        max_new_tokens: Longest answer, the same for every arm.
        compile: Whether this project's engines compile the target model's forward.
        transformers: Whether `transformers.generate` is measured as well.

    Raises:
        ValueError: A list is empty or has a value twice, or a value is out of range.
    """

    drafters: tuple[str, ...]
    trees: tuple[Tree, ...] = ("exact", "static")
    num_draft_tokens: tuple[Nodes, ...] = (16, "auto")
    batches: tuple[int, ...] = (1, 4)
    temperatures: tuple[float, ...] = (0.0,)
    samples: int = 1
    rounds: int = 1
    max_new_tokens: int = 48
    compile: bool = False
    transformers: bool = True

    def __post_init__(self) -> None:
        for name in ("drafters", "trees", "num_draft_tokens", "batches", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be at least one value, none of them twice, not {list(values)}")
        counts = {
            "num_draft_tokens": [nodes for nodes in self.num_draft_tokens if nodes != "auto"],
            "batches": self.batches,
            "samples": [self.samples],
            "rounds": [self.rounds],
            "max_new_tokens": [self.max_new_tokens],
        }
        for name, numbers in counts.items():
            if wrong := [number for number in numbers if number < 1]:
                raise ValueError(f"{name} must be at least 1, not {wrong[0]}")
        if not all(0 <= temperature < math.inf for temperature in self.temperatures):
            raise ValueError(f"temperatures must be finite and at least 0, not {list(self.temperatures)}")
        if self.samples > 1 and 0 in self.temperatures:
            raise ValueError(
                "samples: at temperature 0 all answers to a question are the same: use one, or other temperatures"
            )
        if unknown := [tree for tree in self.trees if tree not in get_args(Tree)]:
            raise ValueError(f"trees must be {' or '.join(get_args(Tree))}, not {unknown[0]}")
        if {PLAIN.drafter, TRANSFORMERS.drafter} & set(self.drafters):
            raise ValueError(f"drafters: {PLAIN.drafter} and {TRANSFORMERS.drafter} are no drafters: leave them out")
