"""The endpoint: OpenAI's API on Ray Serve, with the same engine as the jobs."""
