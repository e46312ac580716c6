"""Distribute a module over ranks, and run stages that all ranks share."""
