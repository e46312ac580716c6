"""The driver's entry to advantages: which columns an estimator reads, and the batch with its result.

An estimator is a registered name or the dotted path of the user's own function, which runs as it
is. Its parameters are filled by name: `gamma`, `lam` and `norm_adv_by_std_in_grpo` from the
settings, `index` from the column uid, and every other one without a default from the tensor column
of its name (token_level_rewards, response_mask, values, reward_baselines, or one of the user's).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, Estimator
from workers.columns import read_columns, require, write_columns

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

SETTINGS = ("gamma", "lam", "norm_adv_by_std_in_grpo")
"""Parameters that `compute_advantage` fills from the configuration, not from the batch."""


def get_estimator(adv_estimator: str) -> Estimator:
    """The advantage estimator of that name, or the user's own by its dotted path."""
    return ADVANTAGE_ESTIMATORS.look_up(adv_estimator)


def columns_read(adv_estimator: str) -> tuple[str, ...]:
    """The batch's columns that an estimator's parameters ask for."""
    columns = []
    for parameter in inspect.signature(get_estimator(adv_estimator)).parameters.values():
        if parameter.name == "index":
            columns.append("uid")
        elif _is_a_column(parameter):
            columns.append(parameter.name)
    return tuple(columns)


def _is_a_column(parameter: inspect.Parameter) -> bool:
    is_asked_for = (
        parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    )
    return is_asked_for and parameter.name not in SETTINGS


def compute_advantage(
    batch: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
) -> DataProto:
    """The same batch with columns advantages and returns, from token_level_rewards."""
    estimator = get_estimator(adv_estimator)
    settings = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    parameters = inspect.signature(estimator).parameters
    arguments: dict[str, Any] = {name: settings[name] for name in parameters if name in settings}
    for name in columns_read(adv_estimator):
        if name == "uid":
            require(batch, "uid")
            arguments["index"] = batch.non_tensor_batch["uid"]
        else:
            arguments |= read_columns(batch, name)

    advantages, returns = estimator(**arguments)
    return write_columns(batch, advantages=advantages, returns=returns)
