"""How a module lies over ranks, and stages that all ranks go through together."""
