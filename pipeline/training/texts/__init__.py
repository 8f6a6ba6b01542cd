"""The texts of a training run: from a distillation's output to the micro-batches of each step."""
