"""What goes wrong in a training run, and where it began: numerics, explosions, stalls, profiles."""
