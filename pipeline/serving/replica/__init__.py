"""What holds an engine: calls become its requests, and what it generates becomes answers; and what keeps a learner."""
