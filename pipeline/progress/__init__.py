"""How far a job is: engines report, the driver adds up, and people, programs and Prometheus are shown."""
