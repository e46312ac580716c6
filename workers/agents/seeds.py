"""Seeds of the random numbers that user's code may draw from."""

from __future__ import annotations

import random

import numpy as np


def seed_globals(seed: int) -> None:
    """Python's and numpy's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
