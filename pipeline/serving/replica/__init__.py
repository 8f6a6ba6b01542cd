"""What holds an engine: calls become its requests, and what it generates becomes answers. And what keeps the learner."""
