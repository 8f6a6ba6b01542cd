"""The report job: a generation job's output as one page for people."""
