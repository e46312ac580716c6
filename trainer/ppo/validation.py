"""Validation: the whole of `data.val_files`, sampled as `rollout.val_kwargs` says, with noise of
its own.

`PPOTrainer` calls it before the first step (`trainer.val_before_train`) and every
`trainer.test_freq` steps.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.ppo.config import PPOConfig
from trainer.run_folder.folder import write_samples
from trainer.run_folder.metrics import process_validation_metrics
from verl_like.batch.protocol import DataProto
from workers.columns import read_columns
from workers.rewards.process import VOTE

if TYPE_CHECKING:
    from trainer.ppo.step import PPOTrainer

BEST_KNOWN = ("mean", "maj", "best")


def validation_is_due(config: PPOConfig, step: int, total_steps: int) -> bool:
    """Whether one is asked for after this step; step 0 is before the first."""
    trainer = config.trainer
    if not config.data.val_files or step == 0:
        return bool(config.data.val_files) and trainer.val_before_train
    return trainer.test_freq > 0 and (step % trainer.test_freq == 0 or step == total_steps)


def validation_metrics(trainer: PPOTrainer) -> dict[str, float]:
    """Metrics of the whole validation set; its samples go to the run folder."""
    prompts = trainer.loader.validation
    assert prompts is not None, "a validation is due only where there are val_files"
    sampling = asdict(trainer.config.actor_rollout_ref.rollout.val_kwargs)
    num_samples = sampling.pop("n")
    parts = []
    for batch in prompts.in_order():
        rows = batch.repeat(num_samples, interleave=True)
        index = torch.arange(num_samples).repeat(len(batch))
        rows = trainer.roll_out(
            rows.union(DataProto.from_dict({"sample_index": index})), validate=True, **sampling
        )
        rows = trainer.with_rewards(rows)
        rows.meta_info = {}
        parts.append(rows)
    samples = DataProto.concat(_with_equal_columns(parts))
    write_samples(trainer.folder / "validation", trainer.global_step, samples, trainer.tokenizer)
    return name_metrics(samples)


def _with_equal_columns(parts: list[DataProto]) -> list[DataProto]:
    """Numbers that the reward function gave for some batches alone are nan in the others."""
    names = {name for part in parts for name in part.non_tensor_batch}
    for part in parts:
        for name in names - part.non_tensor_batch.keys():
            part.non_tensor_batch[name] = np.full(len(part), np.nan)
    return parts


def name_metrics(samples: DataProto) -> dict[str, float]:
    """`val-core/…` for the mean, best and majority over all samples of the core variable,
    `val-aux/…` for the rest.

    The core variable of a data source is acc, if its rule returns that, and otherwise the reward. A
    sample without one of its data source's numbers (its rule failed) counts 0 there.
    """
    columns = samples.non_tensor_batch
    scores = (
        read_columns(samples, "token_level_scores")["token_level_scores"].sum(-1).double().numpy()
    )
    extras = {
        name.removeprefix("reward_extra/"): columns[name]
        for name in columns
        if name.startswith("reward_extra/")
    }
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(columns["data_source"]):
        rows = columns["data_source"] == source
        infos: dict[str, Any] = {"reward": scores[rows]}
        for name, column in extras.items():
            missing = np.asarray([value != value for value in column[rows]])
            if not missing.all():
                blank = "" if name == VOTE else 0.0
                infos[name] = [
                    blank if gone else value
                    for value, gone in zip(column[rows], missing, strict=True)
                ]
        core = "acc" if "acc" in infos else "reward"
        found = process_validation_metrics(
            [source] * int(rows.sum()), columns["uid"][rows].tolist(), infos
        )
        for variable, values in found[source].items():
            largest = max(_num_samples(metric) for metric in values)
            for metric, value in values.items():
                is_core = (
                    variable == core
                    and metric.startswith(BEST_KNOWN)
                    and _num_samples(metric) == largest
                )
                metrics[f"val-{'core' if is_core else 'aux'}/{source}/{variable}/{metric}"] = value
    lengths = read_columns(samples, "response_mask")["response_mask"].sum(-1).double()
    return metrics | {"val-aux/response_length/mean": lengths.mean().item()}


def _num_samples(metric: str) -> int:
    """N of mean@N, best@N/mean, …"""
    return int(metric.partition("@")[2].partition("/")[0])
