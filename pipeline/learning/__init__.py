"""A head that learns while a job runs: the learner's actor, what engines give it and take from it, and its files."""
