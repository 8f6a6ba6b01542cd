"""The first layers of the target model draft (FastVLM, arXiv 2510.22641)."""

from drafter.plugins import Method

METHOD = Method(
    families={"exit": "drafter.methods.early_exit.drafter:named_exit"},
    heads={"exit": "drafter.methods.early_exit.drafter:ExitHead"},
)
