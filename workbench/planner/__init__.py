"""What a training step should cost, by formula: parameters, FLOPs, memory, time. Plain arithmetic, no torch."""
