"""The task of the example: write a sentence about the requested animal; kind ones score more.

The rule `kindness` chooses the better response of a pair, and evaluates the policies; PPO is not
trained with it. `make_data.py` generates sentences with the same grammar.
"""

from __future__ import annotations

import re

ANIMALS = ("cat", "dog", "fox", "hen", "owl", "pig")
KIND = (("kind", "calm", "glad"), ("sings", "helps", "plays"))
UNKIND = (("rude", "mean", "grim"), ("bites", "growls", "steals"))
"""(adjectives, verbs), as in `KIND`."""
ADJECTIVES, VERBS = (of_kind + others for of_kind, others in zip(KIND, UNKIND, strict=True))
SENTENCE = re.compile(rf"the ({'|'.join(ADJECTIVES)}) (\w+) ({'|'.join(VERBS)})\.")


def kindness(solution_str: str, ground_truth: str) -> dict[str, float]:
    """Score a sentence about the animal 0, 0.5 or 1 by its kind words, and other responses 0."""
    match = SENTENCE.fullmatch(solution_str)
    is_sentence = match is not None and match[2] == ground_truth
    num_kind = int(match[1] in KIND[0]) + int(match[3] in KIND[1]) if match else 0
    return {"score": is_sentence * num_kind / 2, "is_sentence": float(is_sentence)}
