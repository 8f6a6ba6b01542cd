"""The paper's table by one command: a base's prompts, its own answers, every head, β and γ, as a chain of jobs."""
