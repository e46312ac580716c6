"""Observers of a run, each one file: they watch the road through hooks, and change nothing on it.

`trainer.roadside.active` lists which observers a run has.
"""
