"""The machine: what its devices can do, and meters for memory and energy."""
