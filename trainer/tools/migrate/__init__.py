"""Translate command lines of other frameworks into ours: `verl-like migrate`."""
