"""Observers of a run, which watch it through hooks.

`trainer.observers.active` lists the observers of a run.
"""
