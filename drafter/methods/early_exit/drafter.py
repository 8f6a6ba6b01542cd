"""`exit:N`: the target model's first N layers, its final norm and its LM head draft."""

from __future__ import annotations

from typing import cast

from drafter.drafters.contract import Drafter, Loading
from drafter.drafters.first_layers import FirstLayersDrafter
from drafter.errors import LoadError
from drafter.target_model.model import BaseModel


def named_exit(rest: str, loading: Loading) -> Drafter:
    """Return the drafter `exit:rest`; raise `LoadError` if `rest` is no number of layers of the target model."""
    base = cast(BaseModel, loading.base)  # it runs layers of the target model itself
    if not (rest.isascii() and rest.isdigit() and 1 <= int(rest) <= base.num_layers):
        raise LoadError(
            f"drafter 'exit:{rest}': after the colon comes how many of the first layers of {base.name} draft, "
            f"from 1 to {base.num_layers}"
        )
    return FirstLayersDrafter(base, int(rest), loading.nodes)
