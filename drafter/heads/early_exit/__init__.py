"""Early exit: the base's first layers draft, by themselves or with a trained imitation network."""
