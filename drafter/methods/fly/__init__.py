"""FLy (arXiv 2511.22972): a verifier that is not lossless, and the long chains that it needs."""

from drafter.plugins import Method, Sweep

_THETAS = (1.05, 1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
METHOD = Method(
    families={"long": "drafter.methods.fly.method:long_chain"},
    parts={"long": lambda rest: [rest.partition(":")[2]]},
    verifiers={"fly": "drafter.methods.fly.method:FlyVerifier"},
    sweeps={"fly": Sweep("theta", _THETAS)},
)
