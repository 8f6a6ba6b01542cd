"""Early exit with an imitation network (FastVLM, arXiv 2510.22641)."""

from drafter.plugins import Method

METHOD = Method(heads={"imitation": "drafter.methods.imitation.head:ImitationHead"})
