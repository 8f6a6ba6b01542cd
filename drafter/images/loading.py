"""The eyes of a target model that sees: its processor, which is loaded once that is known."""

from __future__ import annotations

from drafter.errors import LoadError
from drafter.images.processor import ImageProcessor, example_of, load_processor
from drafter.prompt import Prompt


class Eyes:
    """Loads a target model's processor when `load_base` asks for an example.

    Attributes:
        processor: None for a model of text alone, and where it cannot be loaded; then `BaseModel.blind` says why.
    """

    processor: ImageProcessor | None = None

    def __call__(self, name: str, *, trust_remote_code: bool) -> Prompt:
        """Return a prompt with an image; raise `LoadError` or `RequestError` if the processor makes none."""
        processor = load_processor(name, trust_remote_code=trust_remote_code)
        if processor is None:
            raise LoadError(f"{name!r} has no processor of images")
        example, self.processor = example_of(processor), processor
        return example
