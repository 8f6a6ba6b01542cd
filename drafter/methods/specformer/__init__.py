"""SpecFormer heads (arXiv 2511.20340)."""

from drafter.plugins import Method

METHOD = Method(
    heads={"specformer": "drafter.methods.specformer.head:SpecFormerHead"},
)
