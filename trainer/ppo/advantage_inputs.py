"""Call an advantage estimator on the driver, with the columns that it reads.

An estimator is a registered name or the dotted path of a user's function. Its parameters are filled
by name:

- the parameters in `SETTINGS`: from the keys of the configuration that they stand for
- `index`: from the column uid
- `epsilon`: from `algorithm.adv_epsilon`, unless that is null
- every other parameter without a default: from the tensor column of its name (token_level_rewards,
  response_mask, values, reward_baselines, or a user's column)
- keyword-only parameters with a default: from `algorithm.args`
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.config import AlgorithmConfig, PPOConfig
from trainer.rollouts.samples import read_named_reward
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError, ConfigError, nearest
from verl_like.placement.pools import expand_roles
from verl_like.registry import is_required
from workers.columns import COLUMNS, read_columns, require, rm_column, write_columns
from workers.config import model_rewards
from workers.config.conditions import ACTOR, has_only_teacher
from workers.rollout.sample import LENGTH_LIMIT

GDPO_KEY = "algorithm.gdpo_reward_keys"
SETTINGS: Mapping[str, str] = {
    "gamma": "gamma",
    "lam": "lam",
    "norm_adv_by_std_in_grpo": "norm_adv_by_std_in_grpo",
    "named_rewards": "gdpo_reward_keys",
    "gdpo_reward_weights": "gdpo_reward_weights",
    "truncated": "bootstrap_truncated",
    "whiten": "running_norm",
}
"""Maps a parameter to the key under `algorithm` that determines its argument."""
WAYS_TO_ROLES = {
    "ref": f", or set {ACTOR}.use_kl_loss=true",
    "teacher": ", or set distillation.teacher_model.model_path",
}
"""Advice that adds a role to the run; the end of a sentence."""


def columns_read(adv_estimator: str) -> tuple[str, ...]:
    """Return the columns of the batch that an estimator's parameters name."""
    columns, estimator = [], ADVANTAGE_ESTIMATORS.look_up(adv_estimator)
    for parameter in inspect.signature(estimator).parameters.values():
        if parameter.name == "index":
            columns.append("uid")
        elif parameter.name == "named_rewards":
            columns.append("token_level_scores")
        elif is_required(parameter) and parameter.name not in SETTINGS:
            columns.append(parameter.name)
    return tuple(columns)


def compares_with_greedy(adv_estimator: str) -> bool:
    """Return whether an estimator needs the scores of greedy responses, as ReMax does."""
    return "reward_baselines" in columns_read(adv_estimator)


def check_columns(config: PPOConfig) -> None:
    """Raise if an estimator needs a column that nothing in this run writes.

    Check nothing if the run has a user's workers, which may write any column, or no estimator.
    """
    name = config.algorithm.adv_estimator
    has_user_workers = any(not path.startswith("workers.") for path in config.role_workers.values())
    if has_user_workers or has_only_teacher(config):
        return
    roles = expand_roles(config.role_mapping)
    models = [rm_column(role) for role in model_rewards(config)]
    for column in columns_read(name):
        known = COLUMNS.get(column)
        if known is not None and known.role and known.role not in roles:
            raise ConfigError(
                f"algorithm.adv_estimator={name} reads the column {column!r}, which the role "
                f"{known.role!r} writes, and this run has no such role. Choose another estimator"
                f"{WAYS_TO_ROLES.get(known.role, '')}."
            )
        if known is None and column not in models:
            tensors = [name for name, other in COLUMNS.items() if other.dtype != "object"]
            raise ConfigError(
                f"nothing fills the parameter {column!r} of algorithm.adv_estimator={name}: it "
                f"is neither index nor a setting ({', '.join(SETTINGS)}) nor a column of the "
                f"batch, such as token_level_rewards or response_mask.{nearest(column, tensors)} "
                "Rename it, give it a default, or write the column in a custom stage "
                "(trainer.cls) or a custom worker (role_workers)."
            )


def compute_advantage(batch: DataProto, adv_estimator: str, **keys: Any) -> DataProto:
    """Add the columns advantages and returns to the batch.

    The batch must have the columns that the estimator reads, such as token_level_rewards. `keys`
    sets keys of `algorithm`, such as `gamma`; the other keys keep their defaults.
    """
    return estimate_advantages(batch, AlgorithmConfig(adv_estimator=adv_estimator, **keys))


def estimate_advantages(batch: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """Add the advantages and returns of the configured estimator to the batch."""
    estimator = ADVANTAGE_ESTIMATORS.look_up(algorithm.adv_estimator)
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(estimator).parameters.items():
        if name == "index":
            require(batch, "uid")
            arguments[name] = batch.non_tensor_batch["uid"]
        elif name == "named_rewards":
            arguments[name] = named_rewards(batch, algorithm.gdpo_reward_keys)
        elif name == "whiten":
            arguments[name] = "advantages" not in algorithm.running_norm
        elif name == "epsilon" and algorithm.adv_epsilon is not None:
            arguments[name] = algorithm.adv_epsilon
        elif name == "truncated":
            arguments[name] = truncated_rows(batch) if algorithm.bootstrap_truncated else None
        elif name in SETTINGS:
            arguments[name] = getattr(algorithm, SETTINGS[name])
        elif is_required(parameter):
            arguments |= read_columns(batch, name)

    check_finite(batch, arguments)
    arguments |= algorithm.args
    advantages, returns = estimator(**arguments)
    return write_columns(batch, advantages=advantages, returns=returns)


def truncated_rows(batch: DataProto) -> Tensor:
    """Return a mask of the samples that were cut at the length limit, [rows]."""
    require(batch, "finish_reason")
    reasons = batch.non_tensor_batch["finish_reason"]
    return torch.tensor([reason == LENGTH_LIMIT for reason in reasons], dtype=torch.bool)


def named_rewards(batch: DataProto, names: Sequence[str]) -> Tensor:
    """Return the rewards of these names as [rows, names], with nan for missing ones.

    A name is seq_reward (the score), or a number that a reward function returns. Raise for a name
    that no sample has.
    """
    columns = [read_named_reward(batch, name, GDPO_KEY).float() for name in names]
    return torch.stack(columns, dim=1)


def check_finite(batch: DataProto, arguments: Mapping[str, Any]) -> None:
    """Raise if rewards or values are nan or infinite; the error names their samples.

    A single such number would spoil the advantages of its whole group or batch.
    """
    for name in ("token_level_rewards", "token_level_scores", "values", "reward_baselines"):
        column = arguments.get(name)
        if column is None or bool(column.sum().isfinite()):
            continue
        rows = (~column.isfinite()).view(len(column), -1).any(dim=-1).nonzero().squeeze(-1)
        if len(rows):
            uids = batch.non_tensor_batch.get("uid", range(len(column)))
            samples = ", ".join(str(uids[int(row)]) for row in rows[:3])
            raise BatchError(
                f"{name} is nan or infinite in {len(rows)} of {len(column)} samples, such as "
                f"those of uid {samples}; no advantage can be computed. The outputs of a model may "
                "have overflowed: the critic (values), a reward model (scores), or, with a KL in "
                "the reward, the actor or the reference (rewards)."
            )
