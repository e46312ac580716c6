"""The training engine and its parts: optimizer, micro-batches, packing, attention, checkpoints."""
