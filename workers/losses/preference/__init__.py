"""Losses that learn from preferences: pure functions of the log-probs of whole responses.

A loss is one file, registered by name in `registry.PREFERENCE_LOSSES`; every file in this folder is
imported here. The parameters of a loss name its inputs: columns of `registry.COLUMNS`, and keys of
the configuration. A loss returns one number per pair or row. `measures` computes the metrics.
"""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
