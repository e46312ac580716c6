"""What a step and a validation say in numbers, with verl's function and metric names.

`PPOTrainer` calls and logs.

Names under `critic/` are verl's also where there is no critic: they are about scores, rewards and
advantages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl_like.errors import BatchError
from workers.columns import has_column, read_columns

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

_PEAKS = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")
_RESPONSE_PHASES = ("gen",)
_SEQUENCE_PHASES = ("ref", "values", "adv", "update_critic", "update_actor")


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number for each name, from a list of them (one per mini-batch, say).

    The rule: a name whose last word is max or min (`…/max`, `…_max`), and verl's two memory peaks,
    take that extreme; every other name takes the mean. Words in the middle of a name decide
    nothing.
    """
    return {name: _reduction(name)(_numbers(values)) for name, values in metrics.items()}


def _reduction(name: str) -> Callable[[np.ndarray], float]:
    last_word = name.replace("/", "_").rpartition("_")[-1]
    if last_word == "max" or name in _PEAKS:
        return lambda numbers: float(numbers.max())
    if last_word == "min":
        return lambda numbers: float(numbers.min())
    return lambda numbers: float(numbers.mean())


def _numbers(values: Any) -> np.ndarray:
    numbers = np.asarray([float(value) for value in np.atleast_1d(values)], dtype=np.float64)
    if not numbers.size:
        raise BatchError("a metric with no values cannot be reduced; leave its name out.")
    return numbers


# ------------------------------------------------------------------------------------------- a step


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values and lengths of a training batch.

    Scores and rewards are a sample's sums, over samples that have a response; the others are per
    response token.
    """
    names = ("response_mask", "token_level_scores", "token_level_rewards", "advantages", "returns")
    columns = read_columns(batch, *names, *(("values",) if use_critic else ()))
    inside = columns["response_mask"].bool()
    prompt_length, response_length = _lengths(batch)
    answered = response_length > 0
    returns = columns["returns"][inside].double()
    metrics = {
        **_extremes("critic/score", columns["token_level_scores"].sum(dim=-1)[answered]),
        **_extremes("critic/rewards", columns["token_level_rewards"].sum(dim=-1)[answered]),
        **_extremes("critic/advantages", columns["advantages"][inside]),
        **_extremes("critic/returns", returns),
    }
    if use_critic:
        values = columns["values"][inside].double()
        metrics |= _extremes("critic/values", values)
        metrics["critic/vf_explained_var"] = (
            1.0 - _var(returns - values) / (_var(returns) + 1e-5)
        ).item()
    max_prompt_length, max_response_length = _widths(batch)
    metrics |= _length_metrics("response_length", response_length, max_response_length)
    if has_column(
        batch, "entropys"
    ):  # the pass for old log-probs gives it; a step that needs none has none
        metrics["actor/entropy"] = _mean(read_columns(batch, "entropys")["entropys"][inside])
    metrics |= _length_metrics(
        "response_length_non_aborted", response_length[answered], max_response_length
    )
    metrics["response/aborted_ratio"] = 1.0 - _mean(answered)
    return metrics | _length_metrics("prompt_length", prompt_length, max_prompt_length)


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Seconds of every phase; milliseconds per token of those that work on tokens, gen on
    responses, others on all.
    """
    prompt_length, response_length = _lengths(batch)
    num_response_tokens = int(response_length.sum())
    num_tokens = {name: num_response_tokens for name in _RESPONSE_PHASES}
    num_tokens |= {
        name: num_response_tokens + int(prompt_length.sum()) for name in _SEQUENCE_PHASES
    }
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name, count in num_tokens.items():
        if name in timing_raw and count:
            metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000 / count
    return metrics


def compute_throughout_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> dict[str, float]:
    """Prompt and response tokens of the step, its seconds, and tokens per second and device."""
    num_tokens = sum(int(lengths.sum()) for lengths in _lengths(batch))
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * n_gpus),
    }


def _widths(batch: DataProto) -> tuple[int, int]:
    """(widest possible prompt, widest possible response)."""
    columns = read_columns(batch, "attention_mask", "responses")
    max_response_length = columns["responses"].shape[-1]
    return columns["attention_mask"].shape[-1] - max_response_length, max_response_length


def _lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """(prompt tokens, response tokens) of every row."""
    inside = read_columns(batch, "attention_mask")["attention_mask"].bool()
    max_prompt_length, _ = _widths(batch)
    return inside[:, :max_prompt_length].sum(dim=-1), inside[:, max_prompt_length:].sum(dim=-1)


def _extremes(name: str, values: Tensor) -> dict[str, float]:
    """Mean, max and min; zeros when there is nothing to look at."""
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


# --------------------------------------------------------------------------------------- validation


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The first value of the most frequent vote; of equally frequent
    ones the vote seen first wins.
    """
    values_of_vote: dict[Any, list[float]] = defaultdict(list)
    for item in data:
        values_of_vote[item[vote_key]].append(item[val_key])
    return max(values_of_vote.values(), key=len)[0]


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[Any]], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """(mean, standard deviation) of each function over `n_bootstrap` draws of `subset_size` items
    with replacement.
    """
    draws = [
        [data[item] for item in draw] for draw in _draws(len(data), subset_size, n_bootstrap, seed)
    ]
    return [
        _mean_and_std(np.asarray([reduce_fn(draw) for draw in draws])) for reduce_fn in reduce_fns
    ]


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> dict[str, dict[str, dict[str, float]]]:
    """{data source: {variable: {metric: mean over its prompts}}}; text variables are left out.

    A prompt is the samples of one uid. For one of N samples: mean@N, std@N, and for n = 2, 4, 8, …
    and N the bootstrap's best@n, worst@n and, if there is a variable `pred` to vote with, maj@n,
    each as /mean and /std.
    """
    rows_of_prompt: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, prompt in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows_of_prompt[prompt].append(row)
    gathered: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for (source, _), rows in rows_of_prompt.items():
        votes = (
            _vote_numbers([infos_dict["pred"][row] for row in rows])
            if "pred" in infos_dict
            else None
        )
        for variable, column in infos_dict.items():
            if not isinstance(column[rows[0]], str):
                values = np.asarray([column[row] for row in rows], dtype=np.float64)
                for metric, value in _prompt_metrics(values, votes, seed).items():
                    gathered[source][variable][metric].append(value)
    return {
        source: {
            variable: {metric: float(np.mean(values)) for metric, values in metrics.items()}
            for variable, metrics in variables.items()
        }
        for source, variables in gathered.items()
    }


def _prompt_metrics(values: np.ndarray, votes: np.ndarray | None, seed: int) -> dict[str, float]:
    """The metrics of one variable of one prompt; all draws at once, as `bootstrap_metric` would
    make them.
    """
    num_samples = len(values)
    metrics = {f"mean@{num_samples}": float(values.mean())}
    if num_samples == 1:
        return metrics
    metrics[f"std@{num_samples}"] = float(values.std())
    powers = (2**exponent for exponent in range(1, num_samples.bit_length()))
    for n in sorted({num_samples, *(power for power in powers if power < num_samples)}):
        draws = _draws(num_samples, n, 1000, seed)
        results = {"best": values[draws].max(axis=1), "worst": values[draws].min(axis=1)}
        if votes is not None:
            ballots = votes[draws]
            support = (ballots[:, :, None] == ballots[:, None, :]).sum(axis=2)
            results["maj"] = values[
                np.take_along_axis(draws, support.argmax(axis=1)[:, None], axis=1)[:, 0]
            ]
        for name, outcome in results.items():
            metrics[f"{name}@{n}/mean"], metrics[f"{name}@{n}/std"] = _mean_and_std(outcome)
    return metrics


def _vote_numbers(votes: Sequence[Any]) -> np.ndarray:
    numbers: dict[Any, int] = {}
    return np.asarray([numbers.setdefault(vote, len(numbers)) for vote in votes])


@lru_cache(maxsize=16)
def _draws(num_items: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray:
    """Item numbers [n_bootstrap, subset_size]: the stream that verl draws, without touching numpy's
    global state.
    """
    return np.random.RandomState(seed).choice(
        num_items, size=(n_bootstrap, subset_size), replace=True
    )


def _mean_and_std(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std())
