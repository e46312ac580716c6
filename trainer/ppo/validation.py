"""Validation: the whole of `data.val_files`, sampled as `rollout.val_kwargs` says.

Its noise is its own, so that it changes nothing of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from trainer.ppo.samples import EXTRA, concat_rows, repeat_prompts
from trainer.ppo.validation_metrics import process_validation_metrics
from verl_like.batch.protocol import DataProto
from workers.columns import read_columns
from workers.rewards.outcome import VOTE

BEST_KNOWN = ("mean", "maj", "best")


def sample_all(
    prompts: Iterable[DataProto],
    roll_out: Callable[..., DataProto],
    with_rewards: Callable[[DataProto], tuple[DataProto, dict[str, float]]],
    *,
    n: int,
    **sampling: Any,
) -> DataProto:
    """`n` scored samples of every prompt.

    `roll_out(rows, validate=True, **sampling)` makes the responses, `with_rewards(rows)` scores
    them.
    """
    parts = []
    for batch in prompts:
        rows = roll_out(repeat_prompts(batch, n), validate=True, **sampling)
        rows, _ = with_rewards(rows)
        rows.meta_info = {}
        parts.append(rows)
    return concat_rows(parts)


def name_metrics(samples: DataProto) -> dict[str, float]:
    """Metrics of every data source under verl's names, and the mean length of a response.

    `val-core/…` are mean, best and majority over all samples of the core variable, `val-aux/…` the
    rest. The core variable is acc, if the data source's rule returns that, otherwise the reward.
    """
    sources = samples.non_tensor_batch["data_source"]
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        metrics |= _source_metrics(samples, source, sources == source)
    lengths = read_columns(samples, "response_mask")["response_mask"].sum(-1).double()
    return metrics | {"val-aux/response_length/mean": lengths.mean().item()}


def _source_metrics(samples: DataProto, source: str, rows: Any) -> dict[str, float]:
    """The metrics of one data source, whose rows these are."""
    variables = _variables(samples, rows)
    core = "acc" if "acc" in variables else "reward"
    uids = samples.non_tensor_batch["uid"][rows].tolist()
    found = process_validation_metrics([source] * len(uids), uids, variables)

    metrics: dict[str, float] = {}
    for variable, values in found[source].items():
        largest = max(_num_samples(metric) for metric in values)
        for metric, value in values.items():
            is_over_all = metric.startswith(BEST_KNOWN) and _num_samples(metric) == largest
            kind = "core" if variable == core and is_over_all else "aux"
            metrics[f"val-{kind}/{source}/{variable}/{metric}"] = value
    return metrics


def _variables(samples: DataProto, rows: Any) -> dict[str, Any]:
    """The reward, and what the rule returned beside it.

    A sample without one of its data source's numbers (its rule failed) counts 0 there.
    """
    scores = read_columns(samples, "token_level_scores")["token_level_scores"]
    variables: dict[str, Any] = {"reward": scores.sum(-1).double().numpy()[rows]}
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
    """N of mean@N, best@N/mean and the like."""
    return int(metric.partition("@")[2].partition("/")[0])
