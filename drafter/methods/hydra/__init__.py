"""Hydra heads (arXiv 2402.05109)."""

from drafter.plugins import Method

METHOD = Method(
    heads={"hydra": "drafter.methods.hydra.head:HydraHead"},
    layouts={"hydra": "drafter.methods.hydra.head:LAYOUT"},
)
