"""FLy (arXiv 2511.22972): a verifier that is not lossless, and the long chains that it needs."""

from drafter.plugins import Method

METHOD = Method(
    families={"long": "drafter.methods.fly.long_chain:long_chain"},
    verifiers={"fly": "drafter.methods.fly.verifier:FlyVerifier"},
)
