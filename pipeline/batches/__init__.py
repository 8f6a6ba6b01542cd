"""OpenAI's files and batches: a folder that keeps them, the rows' way to the endpoint's engines, and the routes."""
