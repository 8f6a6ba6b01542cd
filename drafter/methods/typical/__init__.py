"""Typical acceptance (Medusa, arXiv 2401.10774): a verifier that is not lossless."""

from drafter.plugins import Method, Sweep

METHOD = Method(
    verifiers={"typical": "drafter.methods.typical.verifier:TypicalVerifier"},
    sweeps={"typical": Sweep("delta", (0.9, 0.5, 0.3, 0.09, 0.03, 0.01))},
)
