"""The names that authors of roles, engines, losses and recipes import.

    from verl_like.extend import HFRolloutEngine, PPOTrainer, ScoreTrainEngine

Each name is imported on first use, like the names of `verl_like`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_like.lazy import import_name, names_by_block

if TYPE_CHECKING:  # `X as X` tells type checkers that the name is public
    from trainer.async_training.samplers import BATCH_SAMPLERS as BATCH_SAMPLERS
    from trainer.async_training.samplers import BatchSampler as BatchSampler
    from trainer.async_training.samplers import BufferView as BufferView
    from trainer.async_training.samplers import SampleChunk as SampleChunk
    from trainer.async_training.samplers import SelectedBatch as SelectedBatch
    from trainer.async_training.samplers import select_chunks as select_chunks
    from trainer.async_training.samplers import urgent_chunks_first as urgent_chunks_first
    from trainer.config.schema import TRACKERS as TRACKERS
    from trainer.config.schema import Recipe as Recipe
    from trainer.config.schema import RunConfig as RunConfig
    from trainer.config.schema import placement_presets as placement_presets
    from trainer.loop import Trainer as Trainer
    from trainer.ppo.advantages.estimators import (
        compute_grpo_outcome_advantage as compute_grpo_outcome_advantage,
    )
    from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS as ADVANTAGE_ESTIMATORS
    from trainer.ppo.advantages.registry import kl_belongs_in_loss as kl_belongs_in_loss
    from trainer.ppo.filters import register_filter as register_filter
    from trainer.ppo.rollout_gap import diagnose_rollout_gap as diagnose_rollout_gap
    from trainer.ppo.stages import PPOTrainer as PPOTrainer
    from trainer.reward_model.step import RewardModelTrainer as RewardModelTrainer
    from trainer.rollouts.samples import repeat_prompts as repeat_prompts
    from trainer.rollouts.turns import trajectory_chats as trajectory_chats
    from trainer.run_folder.metrics import describe_reached_target as describe_reached_target
    from trainer.run_folder.metrics import reduce_metrics as reduce_metrics
    from trainer.run_folder.tracking import Tracker as Tracker
    from trainer.run_state import RunRecipe as RunRecipe
    from trainer.sft.step import SFTTrainer as SFTTrainer
    from trainer.tools.bisect.adapters import datum_arrays as datum_arrays
    from trainer.tools.bisect.adapters import record_verl_step as record_verl_step
    from trainer.tools.bisect.trl_callback import RecordCallback as RecordCallback
    from trainer.tools.evaluation.recipe import EVAL as EVAL
    from trainer.tools.evaluation.step import Evaluation as Evaluation
    from verl_like.calls.result import CallResult as CallResult
    from verl_like.config_key import KeyRules as KeyRules
    from verl_like.config_key import ReadWhen as ReadWhen
    from verl_like.config_key import config_field as config_field
    from verl_like.config_key import replace_keys as replace_keys
    from workers.agents.environment import ENVIRONMENT_ADAPTERS as ENVIRONMENT_ADAPTERS
    from workers.columns import SEQUENCE_COLUMNS as SEQUENCE_COLUMNS
    from workers.columns import Column as Column
    from workers.columns import batch_columns as batch_columns
    from workers.columns import read_columns as read_columns
    from workers.columns import write_columns as write_columns
    from workers.config import FSDPConfig as FSDPConfig
    from workers.config import ModelConfig as ModelConfig
    from workers.config import OptimConfig as OptimConfig
    from workers.config.rollout import ROLLOUT_ENGINES as ROLLOUT_ENGINES
    from workers.losses.aggregate import agg_loss as agg_loss
    from workers.losses.preference import PREFERENCE_LOSSES as PREFERENCE_LOSSES
    from workers.losses.preference import REWARD_MODEL_LOSSES as REWARD_MODEL_LOSSES
    from workers.losses.registry import POLICY_LOSSES as POLICY_LOSSES
    from workers.losses.registry import declare_chosen_tokens as declare_chosen_tokens
    from workers.losses.registry import declare_loss_keys as declare_loss_keys
    from workers.losses.registry import token_loss as token_loss
    from workers.models.load import load_model as load_model
    from workers.rewards.manager import decode_responses as decode_responses
    from workers.rewards.weighted import place_at_last_token as place_at_last_token
    from workers.roles.actor import ActorWorker as ActorWorker
    from workers.roles.critic import CriticWorker as CriticWorker
    from workers.roles.rollout import RolloutWorker as RolloutWorker
    from workers.rollout.base import EngineLimits as EngineLimits
    from workers.rollout.base import RolloutEngine as RolloutEngine
    from workers.rollout.base import SamplingParams as SamplingParams
    from workers.rollout.hf import HFRolloutEngine as HFRolloutEngine
    from workers.rollout.native.engine import NativeRolloutEngine as NativeRolloutEngine
    from workers.rollout.sample import Sample as Sample
    from workers.rollout.sampling import sample_seed as sample_seed
    from workers.rollout.vllm.worker import WorkerExtension as WorkerExtension
    from workers.training.checkpoints.calls import CheckpointMixin as CheckpointMixin
    from workers.training.loss import Loss as Loss
    from workers.training.microbatch import MicroBatchBudget as MicroBatchBudget
    from workers.training.microbatch import MiniBatch as MiniBatch
    from workers.training.optim import LR_SCHEDULES as LR_SCHEDULES
    from workers.training.optim import OPTIMIZERS as OPTIMIZERS
    from workers.training.optim import OptimStepSettings as OptimStepSettings
    from workers.training.optim import lr_factor as lr_factor
    from workers.training.role_model_spec import RoleModelSpec as RoleModelSpec
    from workers.training.row_scores import ScoreTrainEngine as ScoreTrainEngine
    from workers.training.update import update_model as update_model
    from workers.weights.full_weights import ModuleWriter as ModuleWriter
    from workers.weights.sync import sync_weights as sync_weights

[_MODULE_OF] = names_by_block(__file__)
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    return import_name(__name__, _MODULE_OF, name)
