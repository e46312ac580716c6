"""The names that authors of roles, engines, losses and recipes import.

    from verl_like.extend import HFEngine, PPOTrainer, ScoreEngine

Each name is imported on first use, like the names of `verl_like`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `X as X` tells type checkers that the name is public
    from trainer.async_training.samplers import BATCH_SAMPLERS as BATCH_SAMPLERS
    from trainer.async_training.samplers import BatchSampler as BatchSampler
    from trainer.async_training.samplers import BufferView as BufferView
    from trainer.async_training.samplers import SampleChunk as SampleChunk
    from trainer.async_training.samplers import SelectedBatch as SelectedBatch
    from trainer.async_training.samplers import select_chunks as select_chunks
    from trainer.async_training.samplers import urgent_chunks_first as urgent_chunks_first
    from trainer.config.recipe import Recipe as Recipe
    from trainer.config.recipe import placement_presets as placement_presets
    from trainer.config.schema import TRACKERS as TRACKERS
    from trainer.config.schema import RunConfig as RunConfig
    from trainer.loop import Trainer as Trainer
    from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS as ADVANTAGE_ESTIMATORS
    from trainer.ppo.advantages.registry import kl_belongs_in_loss as kl_belongs_in_loss
    from trainer.ppo.mismatch import diagnose_rollout_gap as diagnose_rollout_gap
    from trainer.ppo.stages import PPOTrainer as PPOTrainer
    from trainer.reward_model.step import RewardModelTrainer as RewardModelTrainer
    from trainer.run_folder.metrics import reached_target as reached_target
    from trainer.run_folder.metrics import reduce_metrics as reduce_metrics
    from trainer.run_folder.tracking import Tracker as Tracker
    from trainer.sft.step import SFTTrainer as SFTTrainer
    from verl_like.config_key import KeyRules as KeyRules
    from verl_like.config_key import ReadWhen as ReadWhen
    from verl_like.config_key import config_field as config_field
    from workers.agents.environment import ENVIRONMENT_ADAPTERS as ENVIRONMENT_ADAPTERS
    from workers.columns import read_columns as read_columns
    from workers.columns import write_columns as write_columns
    from workers.config import FSDPConfig as FSDPConfig
    from workers.config import ModelConfig as ModelConfig
    from workers.config import OptimConfig as OptimConfig
    from workers.config.rollout import ROLLOUT_ENGINES as ROLLOUT_ENGINES
    from workers.losses.aggregate import agg_loss as agg_loss
    from workers.losses.pairwise import REWARD_MODEL_LOSSES as REWARD_MODEL_LOSSES
    from workers.losses.preference.registry import PREFERENCE_LOSSES as PREFERENCE_LOSSES
    from workers.losses.registry import POLICY_LOSSES as POLICY_LOSSES
    from workers.losses.registry import chooses_tokens as chooses_tokens
    from workers.losses.registry import declare_loss_keys as declare_loss_keys
    from workers.losses.token_loss import token_loss as token_loss
    from workers.models.load import load_model as load_model
    from workers.rewards.weighted import place_at_last_token as place_at_last_token
    from workers.rollout.base import EngineLimits as EngineLimits
    from workers.rollout.base import RolloutEngine as RolloutEngine
    from workers.rollout.base import SamplingParams as SamplingParams
    from workers.rollout.hf import HFEngine as HFEngine
    from workers.rollout.native.engine import NativeEngine as NativeEngine
    from workers.rollout.sample import Sample as Sample
    from workers.rollout.sampling import noise_key as noise_key
    from workers.training.checkpoint import CheckpointMixin as CheckpointMixin
    from workers.training.microbatch import MicroBatchBudget as MicroBatchBudget
    from workers.training.microbatch import MiniBatch as MiniBatch
    from workers.training.optim import OPTIMIZERS as OPTIMIZERS
    from workers.training.optim import OptimStepSettings as OptimStepSettings
    from workers.training.role_model import RoleModelSpec as RoleModelSpec
    from workers.training.schedules import LR_SCHEDULES as LR_SCHEDULES
    from workers.training.schedules import lr_factor as lr_factor
    from workers.training.score_engine import ScoreEngine as ScoreEngine
    from workers.weights.module_writer import ModuleWriter as ModuleWriter

_NAMES = {
    "trainer.async_training.samplers": (
        "BatchSampler",
        "BufferView",
        "BATCH_SAMPLERS",
        "SampleChunk",
        "SelectedBatch",
        "select_chunks",
        "urgent_chunks_first",
    ),
    "trainer.config.recipe": ("Recipe", "placement_presets"),
    "trainer.config.schema": ("RunConfig", "TRACKERS"),
    "trainer.loop": ("Trainer",),
    "trainer.ppo.advantages.registry": ("ADVANTAGE_ESTIMATORS", "kl_belongs_in_loss"),
    "trainer.ppo.mismatch": ("diagnose_rollout_gap",),
    "trainer.ppo.stages": ("PPOTrainer",),
    "trainer.reward_model.step": ("RewardModelTrainer",),
    "trainer.run_folder.metrics": ("reached_target", "reduce_metrics"),
    "trainer.run_folder.tracking": ("Tracker",),
    "trainer.sft.step": ("SFTTrainer",),
    "verl_like.config_key": ("KeyRules", "ReadWhen", "config_field"),
    "workers.agents.environment": ("ENVIRONMENT_ADAPTERS",),
    "workers.columns": ("read_columns", "write_columns"),
    "workers.config": ("FSDPConfig", "ModelConfig", "OptimConfig"),
    "workers.config.rollout": ("ROLLOUT_ENGINES",),
    "workers.losses.aggregate": ("agg_loss",),
    "workers.losses.pairwise": ("REWARD_MODEL_LOSSES",),
    "workers.losses.preference.registry": ("PREFERENCE_LOSSES",),
    "workers.losses.registry": ("POLICY_LOSSES", "chooses_tokens", "declare_loss_keys"),
    "workers.losses.token_loss": ("token_loss",),
    "workers.models.load": ("load_model",),
    "workers.rewards.weighted": ("place_at_last_token",),
    "workers.rollout.base": ("EngineLimits", "RolloutEngine", "SamplingParams"),
    "workers.rollout.hf": ("HFEngine",),
    "workers.rollout.native.engine": ("NativeEngine",),
    "workers.rollout.sample": ("Sample",),
    "workers.rollout.sampling": ("noise_key",),
    "workers.training.checkpoint": ("CheckpointMixin",),
    "workers.training.microbatch": ("MiniBatch", "MicroBatchBudget"),
    "workers.training.optim": ("OPTIMIZERS", "OptimStepSettings"),
    "workers.training.role_model": ("RoleModelSpec",),
    "workers.training.schedules": ("LR_SCHEDULES", "lr_factor"),
    "workers.training.score_engine": ("ScoreEngine",),
    "workers.weights.module_writer": ("ModuleWriter",),
}
"""The public names of each module."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'verl_like.extend' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
