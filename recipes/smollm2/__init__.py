"""How the draft head of SmolLM2-135M-Instruct, dequantised from Q4_1, was made: the model, its prompts, its answers."""
