"""One reward in the forms of four frameworks: 1 if the response contains the ground truth."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """Score one response, in verl's form, which is also ours."""
    return float(str(ground_truth) in solution_str)


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], **_: Any
) -> dict[str, Any]:
    """Score responses in OpenRLHF's form: `queries` are prompts with their responses."""
    import torch

    scores = torch.tensor(
        [
            compute_score("", query.rpartition(prompt)[2], label)
            for query, prompt, label in zip(queries, prompts, labels, strict=True)
        ]
    )
    return {"rewards": scores, "scores": scores, "extra_logs": {}}


def reward_of_chats(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    """Score responses in TRL's form: a response is a list of messages."""
    return [
        compute_score("", messages[0]["content"], truth)
        for messages, truth in zip(completions, ground_truth, strict=True)
    ]
