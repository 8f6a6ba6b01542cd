"""The base model: any causal LM of transformers, its KV cache, and how its forward is run."""
