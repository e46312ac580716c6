"""Check the rewards of a run before any model is loaded: their keys, then their results.

    check_rewards(config)
    reject_wrong_results(rewards, prompts, tokenizer, config.data.max_response_length)  # every run
    scored, lines = try_rewards(rewards, prompts, tokenizer, config.data.max_response_length)

The functions run on synthetic responses: the row's ground truth as text, or the prompt if it has
none. Reward models and servers are not called.
"""

from __future__ import annotations

from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import torch

from trainer.data.prompts import PromptSet
from trainer.rollouts.samples import EXTRA
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, RewardError, few
from workers.columns import sample_scores
from workers.rewards.outcome import NO_REWARD, with_source
from workers.rewards.weighted import SLOW_S, Rewards


def check_rewards(config: Any) -> None:
    """Raise if the configured rewards cannot score samples."""
    if config.reward.list:
        names = [reward.name for reward in config.reward.list]
        for number, reward in enumerate(config.reward.list):
            where = f"reward.list[{number}]"
            if not reward.name.isidentifier() or names.index(reward.name) != number:
                raise ConfigError(
                    f"{where}.name={reward.name!r}: every reward needs a unique name of letters, "
                    "digits and _ that does not begin with a digit, because its metrics, columns "
                    "and roles contain the name."
                )
            if reward.kind == "model" and not reward.path:
                raise ConfigError(
                    f"{where} is a model. Set its path to the folder of a classifier."
                )
            if reward.kind == "remote":
                from workers.rewards.remote import check_url

                check_url(reward.url, reward.name)

        if not any(reward.weight for reward in config.reward.list):
            raise ConfigError(
                f"every weight in reward.list is 0 ({', '.join(names)}), so no reward counts. "
                "Set another weight."
            )
    elif config.reward.model.enable and not config.reward.model.path:
        raise ConfigError(
            "reward.model.enable=true needs a model. Set reward.model.path to the folder of a "
            "sequence classifier."
        )

    buffer, limit = config.reward.overlong_penalty, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= limit:
        raise ConfigError(
            f"reward.overlong_penalty.len={buffer.len} tokens: it must be between 1 and "
            f"data.max_response_length={limit}; DAPO uses a fifth of this limit."
        )


MOST_ROWS = 8


def reject_wrong_results(rewards: Rewards, prompts: PromptSet, tokenizer: Any, width: int) -> None:
    """Raise if a user's function gives no reward for the first row's ground truth.

    With `on_failure: skip`, only a result of the wrong kind raises. Other failures are printed,
    because the function may work on a model's responses.
    """
    for part in rewards.parts:
        if part.manager is None or part.config.kind != "function" or not part.config.path:
            continue
        row = synthetic_responses(prompts, prompts.rows[:1].tolist(), tokenizer, width)
        future = part.manager.remote(row)
        wait([future], SLOW_S)
        if not future.done():
            rewards.note_slow(part, "the first row, before models are loaded")
        scored, label = future.result(), part.config.label
        if scored.note:
            print(f"note: {label}: {scored.note}", flush=True)
        for failure in scored.failures.values():
            error = with_source(failure.error)
            problem = f"{label}, tried on the first row's ground truth: {error}"
            if NO_REWARD in error or part.config.on_failure != "skip":
                raise ConfigError(problem)
            print(f"note: {' '.join(problem.split())}", flush=True)


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
    rest = [row for row in prompts.rows[: 2 * MOST_ROWS].tolist() if row not in first]
    batch = synthetic_responses(prompts, [*first, *rest][:MOST_ROWS], tokenizer, width)

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
            "the reward function failed for every row of the trial, with the row's ground truth "
            f"as response ({len(batch)} in all). The cause is printed above."
        )
    scores = sample_scores(scored)
    names = [name.removeprefix(EXTRA) for name in scored.non_tensor_batch]
    beside = f"; the reward also returns {', '.join(names)}" if names else ""
    labels = [part.config.label.removeprefix("the ") for part in functions if part.config.path]
    if len(labels) < len(functions):
        labels += [
            f"rule for {name}" for name in dict.fromkeys(batch.non_tensor_batch["data_source"])
        ]
    line = (
        f"Reward check ({few(labels)}): {len(batch)} rows with their ground truth as response; "
        f"{_describe_scores(float(scores.min()), float(scores.max()), labels)}{beside}"
    )
    return (None if num_failed else batch.union(scored)), [line]


def _describe_scores(least: float, most: float, labels: list[str]) -> str:
    """Describe the scores of the ground truths, and explain what it means if none is above zero."""
    if least < most:
        return f"scores from {least:.4g} to {most:.4g}"
    if most > 0:
        return f"every score is {most:.4g}"
    if labels == ["rule for openai/gsm8k"]:
        return f"every score is {most:.4g}, because this rule requires `####` before the number"
    return (
        f"every score is {most:.4g} (expected if the reward requires a format that the ground "
        "truth lacks; otherwise check the reward)"
    )


def synthetic_responses(
    prompts: PromptSet, rows: list[int], tokenizer: Any, width: int
) -> DataProto:
    """Return these rows with their ground truths, or without one their prompts, as responses."""
    batch = prompts.batch(rows, epoch=0)
    responses = torch.full((len(batch), width), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros_like(responses)
    for row, rule in enumerate(batch.non_tensor_batch["reward_model"]):
        truth = rule["ground_truth"]
        if truth is None:
            from workers.rewards.call import prompt_text

            truth = prompt_text({"raw_prompt": batch.non_tensor_batch["raw_prompt"][row]})
        text = truth if isinstance(truth, str) else str(truth)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:width]
        ids = ids or [tokenizer.eos_token_id or 0]
        responses[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
    return batch.union(DataProto.from_dict({"responses": responses, "response_mask": mask}))
