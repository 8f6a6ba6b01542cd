"""Ray clusters: the one a job joins, local ones for tests, and jobs submitted elsewhere."""
