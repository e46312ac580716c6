"""An agent that uses only OpenAI's client and knows nothing about the training behind it.

It asks for a letter, and then for more of that letter. Its reward is the fraction of characters in
both responses that are the letter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai


def run(row: Mapping[str, Any]) -> float:
    """Hold one conversation, for one row of the data; return its reward."""
    policy = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY point to the policy
    messages: list[Any] = list(row["prompt"])
    text = ""
    for _ in range(2):
        completion = policy.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        answer = completion.choices[0].message
        text += answer.content or ""
        messages += [answer, {"role": "user", "content": "more"}]
    return text.count(row["ground_truth"]) / max(len(text), 1)
