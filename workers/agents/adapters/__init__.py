"""Environments of other packages, one file each; `workers.agents.environment.ADAPTERS` names them.

A package is imported when its prefix is chosen, in the environments' process, and its id is looked
up there before a trajectory begins.
"""
