"""Images in prompts: messages with image parts, opening files, and what the model's processor makes of them."""
