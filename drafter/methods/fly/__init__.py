"""FLy (arXiv 2511.22972): a verifier that is not lossless, and the long chains that it needs."""

from drafter.plugins import Method

METHOD = Method(
    families={"long": "drafter.methods.fly.method:long_chain"},
    parts={"long": lambda rest: [rest.partition(":")[2]]},
    verifiers={"fly": "drafter.methods.fly.method:FlyVerifier"},
)
