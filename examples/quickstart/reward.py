"""The reward of the quickstart, which checks sums."""

from __future__ import annotations


def verify(response: str, ground_truth: str) -> float:
    """Return 1 if the text after the last `####`, if any, is the right number, otherwise 0."""
    return float(response.rpartition("####")[2].strip() == ground_truth)
