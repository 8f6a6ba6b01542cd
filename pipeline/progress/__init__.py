"""How far a job is: for people, for programs and for Prometheus."""
