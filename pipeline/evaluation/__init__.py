"""The evaluation job: what a drafter gains on this machine."""
