"""EAGLE-3 heads (arXiv 2503.01840)."""

from drafter.plugins import Method

METHOD = Method(
    heads={"eagle3": "drafter.methods.eagle3.head:Eagle3Head"},
    layouts={"eagle3": "drafter.methods.eagle3.published:LAYOUT"},
)
