"""Environments of other packages, one file each; `ENVIRONMENT_ADAPTERS` names them.

A package is imported only if its prefix is used, in the environments' process. This process also
checks the id before a trajectory begins.
"""
