"""Distribute a module over ranks, and run work that all ranks do together."""
