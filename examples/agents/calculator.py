"""A tool, and the reward of an answer that follows its calls."""

from __future__ import annotations


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def reward(response: str, answer: str) -> float:
    """1 for the right sum after the last call."""
    return float(response.rpartition("}")[2] == answer)
