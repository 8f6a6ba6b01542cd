"""What the generation job costs and survives: Ray, resuming, killed processes, large inputs."""
