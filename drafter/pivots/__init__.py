"""What the classifier of the verifier `pad` learns from: rejected tokens, what they do to answers, and training."""
