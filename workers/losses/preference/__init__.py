"""Losses that learn from preferences: pure functions of the log-probs of whole responses.

A loss is one file, found by its name in `registry.PREFERENCE_LOSSES`; a file that is put here is
imported here. Its parameters say what it reads: columns of `registry.COLUMNS`, and keys of the
configuration. It gives the loss of every pair or row, of which `measures` makes means.
"""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
