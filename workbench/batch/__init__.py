"""Running notebooks in batch: typed parameters, one child process per run, ladders of several. No torch."""
