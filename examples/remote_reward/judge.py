"""The reward that the server answers with: how much of a response is the letter that was asked for.

`verl-like serve-reward --function judge.py:share_of_letter` calls it for every sample of a request;
the run beside it, without a server, calls it in a process of its own.
"""

from __future__ import annotations


def share_of_letter(solution_str: str, ground_truth: str) -> dict[str, float]:
    """The share of the asked letter, and, beside the score, how long the response is."""
    num_right = solution_str.count(ground_truth)
    return {"score": num_right / max(len(solution_str), 1), "num_characters": len(solution_str)}
