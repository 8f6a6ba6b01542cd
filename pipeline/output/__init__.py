"""The output of a job: what is in its folder, how it gets there, and what it says of itself."""
