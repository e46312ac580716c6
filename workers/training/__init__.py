"""The training engine and its parts: the model on its ranks, the optimizer, one update."""
