"""A device's side of a shared target model (SLED, arXiv 2506.09397): it drafts, and a server verifies."""
