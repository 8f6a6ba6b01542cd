"""Input wherever it is: file systems, file formats, Hugging Face datasets, and where the prompts are."""
