"""Loaded last by the server of forked processes (`PRELOADED` in `tests/conftest.py`).

What it has loaded stays: the garbage collector of a process need not walk it, nor copy its pages.
"""

import gc

gc.collect()
gc.freeze()
