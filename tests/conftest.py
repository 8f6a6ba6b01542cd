"""Small random models for all tests; nothing is downloaded."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from drafter.base.causal_lm import BaseModel
from tests.support.models import random_model

# Tiny models gain nothing from more threads, and lose much where cores are shared.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Modules stay: the garbage collector need not look through their hundreds of thousands of objects each time."""
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_base() -> BaseModel:
    """A random Llama of three layers with a vocabulary of 97."""
    return BaseModel(random_model("llama"))
