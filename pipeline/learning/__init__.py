"""A head that learns while a job or an endpoint runs: the learner, what engines give it and take from it, its files."""
