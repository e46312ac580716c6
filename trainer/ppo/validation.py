"""Validation: all of `data.val_files`, sampled as `rollout.val_kwargs` configures.

Validation uses separate random numbers, so training is not affected. The metrics are means over a
prompt's samples, and bootstrap estimates of best, worst and majority of n, with verl's names and
random numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

from trainer.data.prompts import PromptSet
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.samples import EXTRA, concat_rows, repeat_prompts
from verl_like.batch.protocol import DataProto
from workers.columns import TRAJECTORY, count_ones, sample_scores
from workers.rewards.outcome import VOTE

BEST_KNOWN = ("mean", "maj", "best")


def sample_all(prompts: PromptSet, rollouts: Rollouts) -> DataProto:
    """Sample every prompt as `rollout.val_kwargs` configures, and score the samples."""
    sampling = asdict(rollouts.config.actor_rollout_ref.rollout.validation)
    num_samples, parts = sampling.pop("n"), []
    for batch in prompts.in_order():
        rows = rollouts.generate(repeat_prompts(batch, num_samples), validate=True, **sampling)
        rows, _ = rollouts.score(rows, normalize=False)
        rows.meta_info = {}
        parts.append(rows)
    return concat_rows(parts)


def name_metrics(samples: DataProto) -> dict[str, float]:
    """Return metrics per data source with verl's names, the mean response length, and turn metrics.

    The core variable of a data source is `acc` if its reward function returns it, otherwise the
    reward. Its mean, best and majority over all samples are under `val-core/…`; all other numbers
    are under `val-aux/…`.
    """
    sources = samples.non_tensor_batch["data_source"]
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        metrics |= _source_metrics(samples, source, sources == source)
    lengths = count_ones(samples, "response_mask").double()
    metrics["val-aux/response_length/mean"] = lengths.mean().item()
    if TRAJECTORY in samples.non_tensor_batch:
        from trainer.rollouts.turns import success_metrics

        metrics |= {f"val-aux/{name}": value for name, value in success_metrics(samples).items()}
    return metrics


def _source_metrics(samples: DataProto, source: str, rows: Any) -> dict[str, float]:
    """Return the metrics of one data source, whose rows are `rows`."""
    variables = _variables(samples, rows)
    core = "acc" if "acc" in variables else "reward"
    uids = samples.non_tensor_batch["uid"][rows].tolist()
    by_source = process_validation_metrics([source] * len(uids), uids, variables)

    metrics: dict[str, float] = {}
    for variable, values in by_source[source].items():
        largest = max(_num_samples(metric) for metric in values)
        for metric, value in values.items():
            is_over_all = metric.startswith(BEST_KNOWN) and _num_samples(metric) == largest
            kind = "core" if variable == core and is_over_all else "aux"
            metrics[f"val-{kind}/{source}/{variable}/{metric}"] = value
    return metrics


def _variables(samples: DataProto, rows: Any) -> dict[str, Any]:
    """Return the reward, and the other values that the reward functions returned.

    A number that a sample lacks counts as 0, for example because its reward function failed.
    """
    variables: dict[str, Any] = {"reward": sample_scores(samples).double().numpy()[rows]}
    for name, column in samples.non_tensor_batch.items():
        if not name.startswith(EXTRA):
            continue
        values = column[rows]
        is_missing = np.asarray([value != value for value in values])
        if is_missing.all():
            continue
        blank = "" if name == EXTRA + VOTE else 0.0
        variables[name.removeprefix(EXTRA)] = [
            blank if missing else value for value, missing in zip(values, is_missing, strict=True)
        ]
    return variables


def _num_samples(metric: str) -> int:
    """Return N of a metric name such as mean@N or best@N/mean."""
    return int(metric.partition("@")[2].partition("/")[0])


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return {data source: {variable: {metric: mean over its prompts}}} without text variables.

    The samples of one uid are a prompt. A prompt with N samples has mean@N. If N > 1, it also has
    std@N and, for n = 2, 4, 8, … < N and n = N, the bootstrap estimates best@n, worst@n and, if
    there is a variable `pred` to vote with, maj@n, each as /mean and /std.
    """
    rows_of_prompt: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, prompt in enumerate(zip(data_sources, sample_uids, strict=True)):
        rows_of_prompt[prompt].append(row)
    gathered: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (source, _), rows in rows_of_prompt.items():
        votes = None
        if "pred" in infos_dict:
            cast, numbers = [infos_dict["pred"][row] for row in rows], dict[Any, int]()
            votes = np.asarray([numbers.setdefault(vote, len(numbers)) for vote in cast])
        for variable, column in infos_dict.items():
            if isinstance(column[rows[0]], str):
                continue
            values = np.asarray([column[row] for row in rows], dtype=np.float64)
            for metric, value in _prompt_metrics(values, votes, seed).items():
                gathered[source, variable, metric].append(value)

    result: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (source, variable, metric), of_prompts in gathered.items():
        result[source][variable][metric] = float(np.mean(of_prompts))
    return result


def _prompt_metrics(values: np.ndarray, votes: np.ndarray | None, seed: int) -> dict[str, float]:
    """Return the metrics of one variable of one prompt.

    A draw takes n samples with replacement; all draws are computed together.
    """
    num_samples = len(values)
    metrics = {f"mean@{num_samples}": float(values.mean())}
    if num_samples == 1:
        return metrics
    metrics[f"std@{num_samples}"] = float(values.std())
    powers = (2**exponent for exponent in range(1, num_samples.bit_length()))
    for n in sorted({num_samples, *(power for power in powers if power < num_samples)}):
        draws = _draws(num_samples, n, seed)
        results = {"best": values[draws].max(axis=1), "worst": values[draws].min(axis=1)}
        if votes is not None:
            ballots = votes[draws]
            support = (ballots[:, :, None] == ballots[:, None, :]).sum(axis=2)
            results["maj"] = values[draws[np.arange(len(draws)), support.argmax(axis=1)]]
        for name, outcome in results.items():
            metrics[f"{name}@{n}/mean"] = float(outcome.mean())
            metrics[f"{name}@{n}/std"] = float(outcome.std())
    return metrics


@lru_cache(maxsize=16)
def _draws(num_items: int, subset_size: int, seed: int) -> np.ndarray:
    """Return item indices [1000, subset_size], drawn with verl's random stream.

    numpy's global random state is not changed.
    """
    return np.random.RandomState(seed).choice(num_items, size=(1000, subset_size), replace=True)
