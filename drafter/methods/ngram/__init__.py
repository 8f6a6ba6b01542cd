"""Prompt lookup: n-grams of the row itself draft."""

from drafter.plugins import Method

METHOD = Method(drafters={"ngram": "drafter.methods.ngram.drafter:ngram"}, automatic={"ngram": "alone"})
