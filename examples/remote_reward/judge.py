"""The reward function of the server: the fraction of a response that is the requested letter.

`verl-like serve-reward --function judge.py:share_of_letter` calls it for every sample of a request.
The other run of this example, without a server, calls it in a separate local process.
"""

from __future__ import annotations


def share_of_letter(solution_str: str, ground_truth: str) -> dict[str, float]:
    """Return the fraction of characters that are the letter, and the length of the response."""
    num_right = solution_str.count(ground_truth)
    return {"score": num_right / max(len(solution_str), 1), "num_characters": len(solution_str)}
