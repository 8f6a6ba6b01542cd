"""Smaller language models draft, alone (SpecInfer, arXiv 2305.09781) or one above another (HSD, arXiv 2510.19705)."""

from drafter.plugins import Method

METHOD = Method(
    families={
        "model": "drafter.methods.draft_models.drafter:load_model_drafter",
        "stack": "drafter.methods.draft_models.drafter:load_stack",
    },
)
