"""An agent that knows OpenAI's client, and nothing of what trains the model behind it.

It asks for a letter, then for more of it; its reward is the letter's share of both answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai


def run(row: Mapping[str, Any]) -> float:
    """One conversation, for one row of the data."""
    policy = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY say where the policy is
    messages: list[Any] = list(row["prompt"])
    text = ""
    for _ in range(2):
        completion = policy.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        answer = completion.choices[0].message
        text += answer.content or ""
        messages += [answer, {"role": "user", "content": "more"}]
    return text.count(row["ground_truth"]) / max(len(text), 1)
