"""Loads a target model together with what makes prompts with images for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from drafter.errors import LoadError, RequestError
from drafter.images.processor import ImageProcessor, example_of, load_processor
from drafter.target_model.loading import load_base
from drafter.target_model.model import BaseModel

_log = logging.getLogger(__name__)


def load_with_processor(
    name: str | Path, *, trust_remote_code: bool = False, **loading: Any
) -> tuple[BaseModel, ImageProcessor | None]:
    """Load a target model and its processor, and prove that the model reads an image as transformers does.

    The processor is None for a model of text alone, and where it cannot be loaded; then `BaseModel.blind` says why.

    Args:
        name: Hub id or folder.
        loading: Further arguments of `load_base`.

    Raises:
        LoadError: As `load_base`.
    """
    processor, example, blind = None, None, ""
    try:
        if processor := load_processor(name, trust_remote_code=trust_remote_code):
            example = example_of(processor)
    except (LoadError, RequestError) as reason:
        blind = str(reason)
    base = load_base(name, trust_remote_code=trust_remote_code, example=example, **loading)
    if blind:
        base.blind = f"{name} reads text alone here: {blind}"
        _log.warning(base.blind)
    return base, processor
