"""Ranks of a pool as torchrun started them: the driver is rank 0, the others serve it."""
