"""OpenAI's request and response bodies, translated to and from the engine's types. No Ray, no HTTP."""
