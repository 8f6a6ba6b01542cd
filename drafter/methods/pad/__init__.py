"""PAD (arXiv 2511.00351): a verifier that is not lossless, decided by a classifier of pivots."""

from drafter.plugins import Method

METHOD = Method(
    verifiers={"pad": "drafter.methods.pad.method:PadVerifier"},
)
