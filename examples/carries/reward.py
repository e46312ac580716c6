"""1 for the right sum, 0 for all else."""

from __future__ import annotations


def score(response: str, answer: str) -> dict[str, float]:
    """Compare the digits of a response with those of the answer."""
    right = float(response.strip() == answer)
    return {"score": right, "acc": right}
