"""Loaded first by the test run and by the server of forked processes (`tests/conftest.py`).

Modules are never garbage. With Python's default thresholds, the collector would walk them again and
again while torch, transformers and the tests are loaded, and take a fifth of that time.
"""

import gc

gc.set_threshold(20_000, 20, 20)
