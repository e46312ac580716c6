"""Checkpoints of a role: saved, loaded and exported; begin with `save_load.py`."""
