"""Seed global random number generators that user code may use."""

from __future__ import annotations

import random

import numpy as np


def seed_globals(seed: int) -> None:
    """Seed Python's and numpy's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
