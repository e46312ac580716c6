"""A package of its own: an installed one of the same name cannot hide it from a test's process."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
