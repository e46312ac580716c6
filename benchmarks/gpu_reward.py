"""The reward of the runs of `gpu.sh`: any that differs from sample to sample."""

from __future__ import annotations


def last_digit(response: str) -> float:
    """The last digit of the response's length."""
    return len(response) % 10 / 10
