"""What runs on each training worker: the loop, the sharded optimiser, checkpoints."""
