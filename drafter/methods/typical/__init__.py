"""Typical acceptance (Medusa, arXiv 2401.10774): a verifier that is not lossless."""

from drafter.plugins import Method

METHOD = Method(
    verifiers={"typical": "drafter.methods.typical.verifier:TypicalVerifier"},
)
