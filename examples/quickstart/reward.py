"""The quickstart's reward: the letter that a prompt asks for, in an answer that ends by itself."""

from __future__ import annotations

LIMIT = 8
"""`data.max_response_length`, at which an answer is cut."""


def letters(response: str, ground_truth: str, num_tokens: int) -> float:
    """The share of right letters, out of three at least; half of it for an answer that was cut."""
    share = response.count(ground_truth) / max(len(response), 3)
    return share if num_tokens < LIMIT else share / 2
