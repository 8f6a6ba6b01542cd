"""Progress of a job: engines report, the driver adds up, and displays, files and Prometheus show it."""
