"""The first layers of the target model draft, without training."""

from drafter.plugins import Method

METHOD = Method(families={"exit": "drafter.methods.early_exit.drafter:named_exit"})
