"""Tables of n-grams of a corpus, for the drafter `cacheback`."""
