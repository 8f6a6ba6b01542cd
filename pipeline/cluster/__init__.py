"""Ray clusters: joining and sharing out one, local ones for tests, and submitting jobs to others."""
