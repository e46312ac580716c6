"""Observers of a run, one per file: they watch the run through hooks, and do not change it.

`trainer.observers.active` lists the observers of a run.
"""
