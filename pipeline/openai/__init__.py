"""OpenAI's request and response bodies: what a body asks of the engine, and how its answer is put. No Ray, no HTTP."""
