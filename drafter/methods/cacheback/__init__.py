"""Cacheback (arXiv 2511.21699): tables of n-grams draft, recent ones and frozen ones of a corpus."""

from drafter.plugins import Method

METHOD = Method(
    drafters={"cacheback": "drafter.methods.cacheback.drafter:cacheback"},
    families={"cacheback": "drafter.methods.cacheback.drafter:with_frozen_table"},
    files={"cacheback": "make one with python -m recipes.cacheback"},
    automatic={"cacheback": "merged"},
)
