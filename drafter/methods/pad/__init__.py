"""PAD (arXiv 2511.00351): a verifier that is not lossless, decided by a classifier of pivots."""

from drafter.plugins import Method, Sweep

METHOD = Method(
    verifiers={"pad": "drafter.methods.pad.method:PadVerifier"},
    sweeps={"pad": Sweep("sigma", (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0))},
)
