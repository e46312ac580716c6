"""Metrics of a PPO step's samples; functions and metrics have verl's names.

As in verl, names under `critic/` also exist without a critic: they describe scores, rewards and
advantages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer.run_folder.timeline import call_seconds
from workers.columns import read_column, read_columns, token_counts

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

_SEQUENCE_PHASES = ("ref", "values", "estimate", "update_critic", "update_actor")


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Return metrics of scores, rewards, advantages, returns, values and lengths of a batch.

    Scores and rewards are sums per sample, over samples that have a response. Advantages, returns,
    values and entropy are over response tokens, and lengths over samples.
    """
    names = ("response_mask", "token_level_scores", "token_level_rewards", "advantages", "returns")
    columns = read_columns(batch, *names, *(("values",) if use_critic else ()))
    mask = columns["response_mask"].bool()
    prompt_length, response_length = token_counts(batch)
    answered = response_length > 0
    returns = columns["returns"][mask].double()

    scores = columns["token_level_scores"].sum(dim=-1)
    metrics = {
        **_extremes("critic/score", scores[answered]),
        **_extremes("critic/rewards", columns["token_level_rewards"].sum(dim=-1)[answered]),
        **_extremes("critic/advantages", columns["advantages"][mask]),
        **_extremes("critic/returns", returns),
    }
    if "uid" in batch.non_tensor_batch:
        uids = np.asarray(batch.non_tensor_batch["uid"], dtype=str)[answered.cpu().numpy()]
        metrics |= _standard_error("critic/score/standard_error", scores[answered], uids)
    if use_critic:
        values = columns["values"][mask].double()
        metrics |= _extremes("critic/values", values)
        metrics["critic/vf_explained_var"] = (
            1.0 - _var(returns - values) / (_var(returns) + 1e-5)
        ).item()

    max_response_length = batch.column("responses").shape[-1]
    max_prompt_length = batch.column("attention_mask").shape[-1] - max_response_length
    metrics |= _length_metrics("response_length", response_length, max_response_length)
    metrics |= _entropy(batch, mask)
    metrics |= _length_metrics(
        "response_length_non_aborted", response_length[answered], max_response_length
    )
    metrics["response/aborted_ratio"] = 1.0 - _mean(answered)
    return metrics | _length_metrics("prompt_length", prompt_length, max_prompt_length)


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds per phase, and the milliseconds per token of phases that process tokens.

    The phase `gen` counts response tokens; the others count all tokens.
    """
    prompt_length, response_length = token_counts(batch)
    num_response_tokens = int(response_length.sum())
    num_all_tokens = num_response_tokens + int(prompt_length.sum())
    num_tokens = {"gen": num_response_tokens, **dict.fromkeys(_SEQUENCE_PHASES, num_all_tokens)}
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name, count in num_tokens.items():
        if name in timing_raw and count:
            metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000 / count
    return metrics


def compute_throughout_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> dict[str, float]:
    """Return the tokens of the step, its seconds, and the tokens per second per device."""
    num_tokens = sum(int(lengths.sum()) for lengths in token_counts(batch))
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * n_gpus),
    }


def speed(trainer: Any, batch: DataProto) -> dict[str, float]:
    """Return the throughput and timings of the step that a `PPOTrainer` just ran on this batch."""
    run, timing = trainer.run, trainer.run.timing
    num_devices = sum(plan.world_size for plan in run.groups.placement.pools.values())
    timings = call_seconds(run.calls, trainer.recipe.call_labels) | timing
    return {
        **compute_throughout_metrics(batch, {"step": sum(timing.values())}, num_devices),
        "training/global_step": run.step,
        "training/epoch": trainer.loader.epoch,
        **compute_timing_metrics(batch, timings),
    }


def _standard_error(name: str, scores: Tensor, uids: np.ndarray) -> dict[str, float]:
    """Return the standard error of the mean score, over the means of the prompts' samples.

    The samples of a prompt are not independent, so they count as one.
    """
    _, prompts = np.unique(uids, return_inverse=True)
    count = np.bincount(prompts)
    if len(count) < 2:
        return {}
    means = np.bincount(prompts, weights=scores.double().cpu().numpy()) / count
    return {name: float(means.std(ddof=1) / len(count) ** 0.5)}


def _entropy(batch: DataProto, mask: Tensor) -> dict[str, float]:
    """Return the policy's entropy in nats per token.

    The pass for old log-probs computes it. In a step without that pass, it is estimated by the mean
    of -log p over the sampled tokens, which is unbiased if the rollout samples with the current
    weights and nothing truncates the distribution (top_k, top_p, min_p).
    """
    if "entropys" in batch.columns:
        return {"actor/entropy": _mean(read_column(batch, "entropys")[mask])}
    if "rollout_log_probs" in batch.columns:
        return {"actor/entropy": -_mean(read_column(batch, "rollout_log_probs")[mask])}
    return {}


def _extremes(name: str, values: Tensor) -> dict[str, float]:
    """Return mean, max and min; all are 0 if there are no values."""
    if not values.numel():
        values = torch.zeros(1)
    return {
        f"{name}/mean": _mean(values),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def _length_metrics(name: str, lengths: Tensor, limit: int) -> dict[str, float]:
    return _extremes(name, lengths) | {f"{name}/clip_ratio": _mean(lengths == limit)}


def _mean(values: Tensor) -> float:
    return values.double().mean().item() if values.numel() else 0.0


def _var(values: Tensor) -> Tensor:
    return values.var() if values.numel() > 1 else torch.zeros(())
