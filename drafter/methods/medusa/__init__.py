"""Medusa heads (arXiv 2401.10774)."""

from drafter.plugins import Method

METHOD = Method(
    heads={"medusa": "drafter.methods.medusa.head:MedusaHead"},
    layouts={"medusa": "drafter.methods.medusa.head:LAYOUT"},
)
