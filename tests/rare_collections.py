"""Loaded first by the test run and by the server of forked processes (`tests/conftest.py`).

Modules are no garbage: with Python's thresholds the collector walks them again and again while
torch, transformers and the tests are loaded, for a fifth of that time.
"""

import gc

gc.set_threshold(20_000, 20, 20)
