"""A tool that adds numbers, and a reward for responses that call it."""

from __future__ import annotations


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def reward(response: str, answer: str) -> float:
    """Return 1 if the right sum follows the last call, otherwise 0."""
    return float(response.rpartition("}")[2] == answer)
