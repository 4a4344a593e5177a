"""How one model is spread over ranks: plans and their rules, wrapping, pipelines, checkpoints, and the memory of each rank."""
