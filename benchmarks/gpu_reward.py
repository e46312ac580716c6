"""The reward in the runs of `gpu.sh`; it only needs to differ from sample to sample."""

from __future__ import annotations


def last_digit(response: str) -> float:
    """Return the last digit of the response's length."""
    return len(response) % 10 / 10
