"""Training of a draft head while a job or an endpoint runs: the learner, its link to engines, and its files."""
