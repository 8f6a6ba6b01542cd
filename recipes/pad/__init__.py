"""A classifier for the verifier pad (arXiv 2511.00351): rejected draft tokens, labels by answer quality, training."""
