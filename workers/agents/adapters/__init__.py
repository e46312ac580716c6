"""Environments of other packages, one file each; `workers.agents.environment.ADAPTERS` names them.

A package is imported when its prefix is used, in the environments' process, which also checks the
id before a trajectory begins.
"""
