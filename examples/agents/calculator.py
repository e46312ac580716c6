"""A tool that adds numbers, and a reward for the right sum."""

from __future__ import annotations


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def reward(response: str, answer: str) -> float:
    """Return 1 if the text after the last call, if any, is the right sum, otherwise 0."""
    return float(response.rpartition("}")[2] == answer)
