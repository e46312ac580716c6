"""The training engine and its parts: passes, packing, attention, the optimizer, one update."""
