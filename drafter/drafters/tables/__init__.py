"""Tables of token n-grams: what was used last, what is frequent in a corpus, and a frozen table on disk."""
