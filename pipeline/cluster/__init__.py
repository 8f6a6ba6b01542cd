"""Ray clusters: the one that a job joins and shares out, local ones for tests, and jobs submitted to others."""
