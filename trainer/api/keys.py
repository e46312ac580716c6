"""Keywords of recipes besides their parameters, with types, so that editors complete them.

Any other key of the configuration may be passed by its dotted name, `**{"trainer.val_only": True}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

Section = Mapping[str, Any]
"""Keys of a section of the configuration; a value may be a section, too."""


class RunKeys(TypedDict, total=False):
    """Keywords of every recipe."""

    placement: str
    data: Section
    trainer: Section
    parallel: Section
    ray: Section
    timeouts: Section
    faults: Section
    resource_pool_spec: Mapping[str, Sequence[int]]
    role_mapping: Mapping[str, str]
    role_workers: Mapping[str, str]
    cpus_per_process: int | None
    pool_resources: Section
    learning_rate: float
    num_train_epochs: int
    output_dir: str
    save_steps: int
    eval_steps: int


class PPOKeys(RunKeys, total=False):
    """Keywords of PPO and its variants; the section `reward` has only dotted names."""

    algorithm: str | Section
    correction: str
    async_training: Section
    rewards: Sequence[Any]
    custom_reward_function: Section
    reward_model: Section
    environment: str | Section
    actor_rollout_ref: Section
    critic: Section
    ptx: Section
    distillation: Section
    num_generations: int
    max_completion_length: int
    beta: float
    epsilon: float


class RowKeys(RunKeys, total=False):
    """Keywords of recipes that train one model on rows."""

    model: Any
    rows: Any
    optim: Section
    grad_clip: float
    checkpoint: Section
    loss: str
    center_coef: float
    score_at: str | None
    beta: float
    label_smoothing: float
    simpo_gamma: float
    orpo_lambda: float
    desirable_weight: float
    undesirable_weight: float
    sft_coef: float
    reference_free: bool
    ref: Section
