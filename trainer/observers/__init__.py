"""Observers of a run, one per file: they watch the run through hooks, and change nothing in it.

`trainer.observers.active` lists the observers of a run.
"""
