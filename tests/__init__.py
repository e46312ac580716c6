"""A package, so that an installed package named `tests` cannot hide it from a test's process."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
