"""One training step done right: loop, precision, gradients, batch size, checkpoint, meters."""
