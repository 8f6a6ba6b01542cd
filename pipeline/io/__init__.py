"""Input: file systems, file formats, Hugging Face datasets, and detection of the prompts."""
