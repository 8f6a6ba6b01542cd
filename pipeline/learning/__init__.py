"""A head that learns while a job or an endpoint runs: the learner's actor, what engines give it and take from it, and its files."""
