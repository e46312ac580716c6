"""Half a point for the colour, and half a point for the shape."""

from __future__ import annotations


def score(response: str, answer: str) -> dict[str, float]:
    """Compare a response such as "red circle" with the answer, word by word."""
    words, expected = response.split(), answer.split()
    if len(words) != 2:
        return {"score": 0.0, "colour": 0.0, "shape": 0.0, "acc": 0.0}
    colour, shape = (float(word == right) for word, right in zip(words, expected, strict=True))
    return {"score": (colour + shape) / 2, "colour": colour, "shape": shape, "acc": colour * shape}
