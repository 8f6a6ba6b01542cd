"""One model in several processes of a machine, of which each has a part of the weights (tensor parallelism)."""
