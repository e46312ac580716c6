"""Rewards of the results on SmolLM2: how much of a JSON object is right, how kind a sentence is."""

from __future__ import annotations

import json


def person(response: str, answer: str) -> dict[str, float]:
    """Score a response that should be one JSON object and nothing else.

    0.25 if it is an object, and 0.25 for each right field, less 0.25 for each key that nobody asked
    for. `acc` is 1 if the object equals the answer.
    """
    try:
        written = json.loads(response)
    except ValueError:
        return {"score": 0.0, "acc": 0.0}
    if not isinstance(written, dict):
        return {"score": 0.0, "acc": 0.0}
    right = json.loads(answer)
    fields = sum(written.get(key) == value for key, value in right.items())
    score = 0.25 + 0.25 * fields - 0.25 * len(written.keys() - right.keys())
    return {"score": max(score, 0.0), "acc": float(written == right)}


def kindness(response: str) -> float:
    """Return how friendly VADER finds the words of a sentence, from -1 to 1."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return float(SentimentIntensityAnalyzer().polarity_scores(response)["compound"])
