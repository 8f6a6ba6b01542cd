"""Draft trees: what every drafter proposes and every verifier reads."""
