"""Several ranks: plans, wrapping, checkpoints, and the memory that each rank needs."""
