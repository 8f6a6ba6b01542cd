"""The evaluation job, which measures what a drafter gains on this machine."""
