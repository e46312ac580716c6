"""Tools around a run: checks before it, what reads its folder after it. Training needs none."""
