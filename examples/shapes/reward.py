"""Half a point for the colour, and half a point for the shape."""

from __future__ import annotations


def score(response: str, answer: str) -> float:
    """Compare a response such as "red circle" with the answer, word by word."""
    words, right = response.split(), answer.split()
    hits = sum(word == expected for word, expected in zip(words, right, strict=False))
    return hits / 2 if len(words) == 2 else 0.0
