"""A trial of the rewards on a few rows, for plans: what they score, and why that may be 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trainer.data.prompts import PromptSet
from trainer.rollouts.preflight import has_truth, synthetic_responses
from trainer.rollouts.samples import EXTRA
from verl_like.batch.protocol import DataProto
from verl_like.errors import RewardError, join_few
from workers.columns import sample_scores
from workers.rewards.weighted import Rewards

MAX_ROWS = 8


def try_rewards(
    rewards: Rewards, prompts: PromptSet, tokenizer: Any, width: int
) -> tuple[DataProto | None, list[str]]:
    """Return the scored responses, and a list of lines about them.

    Raise if a function fails on all responses. Return None instead of the responses if there is no
    function, if there is also a server or an environment, or if a function fails on some responses:
    the names of the numbers may then be incomplete.
    """
    functions = [part for part in rewards.parts if part.config.kind == "function"]
    kinds = {part.config.kind for part in rewards.parts}
    if not functions or kinds & {"remote", "environment"}:
        return None, []
    first = prompts.first_of_each_source()
    rest = [row for row in prompts.rows[: 2 * MAX_ROWS].tolist() if row not in first]
    batch = synthetic_responses(prompts, [*first, *rest][:MAX_ROWS], tokenizer, width)

    zeros = torch.zeros(batch.column("response_mask").shape)
    no_model = SimpleNamespace(get=lambda timeout: DataProto.from_dict({"rm_scores": zeros}))

    scored, metrics = rewards.launch(batch, lambda reward: no_model, normalize=False).get()
    # the number of samples that the worst reward could not score
    counts = {name: value for name, value in metrics.items() if name.endswith("/num_failed")}
    of_all = counts.pop("reward/num_failed", 0.0)
    of_rules = of_all - sum(counts.values())  # rules have no count of their own
    num_failed = max(*counts.values(), of_rules, 0.0)
    if num_failed >= len(batch):
        raise RewardError(
            f"the reward function failed for all {describe_responses(batch)}. The cause is printed "
            "above."
        )
    scores = sample_scores(scored)
    names = [name.removeprefix(EXTRA) for name in scored.non_tensor_batch]
    beside = f"; the reward also returns {', '.join(names)}" if names else ""
    labels = [part.config.label.removeprefix("the ") for part in functions if part.config.path]
    if len(labels) < len(functions):
        labels += [
            f"rule for {name}" for name in dict.fromkeys(batch.non_tensor_batch["data_source"])
        ]
    described = _describe_scores(float(scores.min()), float(scores.max()))
    if float(scores.max()) <= 0:
        described += _explain_zeros(batch, tokenizer, labels)
    line = f"Reward check ({join_few(labels)}): {describe_responses(batch)}; {described}{beside}"
    return (None if num_failed else batch.union(scored)), [line]


def _describe_scores(least: float, most: float) -> str:
    if least < most:
        return f"scores from {least:.4g} to {most:.4g}"
    return f"every score is {most:.4g}"


def _explain_zeros(batch: DataProto, tokenizer: Any, labels: list[str]) -> str:
    """Say why no score of the synthetic responses may be above zero."""
    if not any(has_truth(batch)):
        return ", which says little about real responses"
    unwritten = _unwritten_truths(batch, tokenizer)
    if unwritten:
        truth, text = unwritten[0]
        return (
            f", because the tokenizer cannot write {len(unwritten)} of the ground truths: "
            f"{truth!r:.60} is read back as {text!r:.60}. No response can be right. Use a "
            "tokenizer that has these characters, or other ground truths"
        )
    if labels == ["rule for openai/gsm8k"]:
        return ", because this rule requires `####` before the number"
    return (
        " (expected if the reward requires a format that the ground truth lacks; otherwise check "
        "the reward)"
    )


def describe_responses(batch: DataProto) -> str:
    """Return how many rows have their ground truth, or their prompt, as response."""
    num_truths = sum(has_truth(batch))
    counts = {"ground truth": num_truths, "prompt": len(batch) - num_truths}
    texts = [
        f"{count} row{'s' * (count > 1)} with {'their' if count > 1 else 'its'} {name} as response"
        for name, count in counts.items()
        if count
    ]
    no_truth = "" if num_truths else ", because they have no ground truth"
    return " and ".join(texts) + no_truth


def _unwritten_truths(batch: DataProto, tokenizer: Any) -> list[tuple[str, str]]:
    """Return ground truths that differ from the text of their tokens, each with this text."""
    unwritten = []
    for rule in batch.non_tensor_batch["reward_model"]:
        truth = str(rule["ground_truth"])
        ids = tokenizer(truth, add_special_tokens=False)["input_ids"]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if rule["ground_truth"] is not None and "".join(text.split()) != "".join(truth.split()):
            unwritten.append((truth, text))
    return unwritten
