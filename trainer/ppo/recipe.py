"""usage: verl-like ppo algorithm=grpo actor_rollout_ref.model.path=FOLDER
           data.train_files=FILE reward=FILE.py:FUNCTION [key=value ...]

Trains a policy with PPO, GRPO and other algorithms (all: docs/algorithms.md).

Algorithm    algorithm=ppo|grpo|dapo|…  default: PPO with a critic and no KL
             correction=decoupled_token_is|…  off-policy correction
Data         data.train_batch_size=1024  prompts per step (default: 1024)
             data.max_prompt_length=512 data.max_response_length=512  (defaults)
             data.val_files=FILE trainer.test_freq=10  steps between validations
Reward       reward=FILE.py:FUNCTION  default: the rule for a row's data_source
             reward.model.enable=true reward.model.path=FOLDER  a reward model
             environment=FILE.py:CLASS  several turns, with rewards
Sampling     actor_rollout_ref.rollout.n=8  responses per prompt (1; grpo: 8)
             actor_rollout_ref.rollout.name=vllm|native|hf|auto  the engine
Learning     actor_rollout_ref.actor.optim.lr=1e-6 critic.optim.lr=1e-5
             actor_rollout_ref.actor.ppo_mini_batch_size=64  prompts per update
             actor_rollout_ref.actor.kl_loss_coef=0.001  KL in the loss of grpo
Memory       actor_rollout_ref.model.lora_rank=32  LoRA (default: 0, off)
Length       trainer.total_epochs=1 (default) or trainer.total_training_steps=99
Run          trainer.default_local_dir=DIR  the same command resumes the run
             trainer.save_freq=50 (steps) trainer.logger=[console,wandb]
Devices      trainer.nnodes=1 trainer.n_gpus_per_node=4 trainer.device=cpu|cuda
             trainer.backend=ray|local ray.address=HOST:PORT
Placement    placement=colocate|split|standalone
Check first  verl-like check key=value ...  prints the plan, starts nothing
Sweep        --multirun trainer.seed=1,2
Keys         verl-like ppo --cfg all  every key;  --cfg job: what this run reads
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from trainer.config import compose
from trainer.config.schema import Recipe, RunConfig
from trainer.ppo.config import PPOConfig
from trainer.ppo.verl_keys import settings_of_configuration, translate
from verl_like.config_key import replace_keys
from verl_like.registry import get_registry
from workers.config import RolloutCorrectionConfig, has_environment, model_rewards
from workers.config.conditions import has_only_teacher, has_teacher, why_no_critic

C = TypeVar("C", bound=RunConfig)
P = TypeVar("P", bound=PPOConfig)
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
CORRECTION = "algorithm.rollout_correction"
BY_TOKENS = "actor_rollout_ref.actor.use_dynamic_bsz"
ROWS_OF_A_PASS = {
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "actor",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "rollout",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "ref",
    "critic.ppo_micro_batch_size_per_gpu": "critic",
}
"""Maps a key that sets the rows per pass to the role of the pass."""

PLACEMENTS = {
    "colocate": {"global_pool": ["actor_rollout", "ref", "critic", "reward_model", "teacher"]},
    "split": {
        "actor_rollout_ref_pool": ["actor_rollout", "ref"],
        "critic_pool": ["critic", "reward_model", "teacher"],
    },
    "standalone": {
        "actor_pool": ["actor"],
        "rollout_pool": ["rollout"],
        "ref_pool": ["ref"],
        "critic_pool": ["critic"],
        "reward_pool": ["reward_model"],
        "teacher_pool": ["teacher"],
    },
}
"""Maps preset -> pool -> roles. With `split`, the updates of actor and critic overlap, and a
teacher uses the critic's pool."""

REWARD_MODEL_WORKER = "workers.roles.reward_model.RewardModelWorker"
NO_REWARD_MODEL = "reward.model.enable=false, and `reward.list` has no model"
"""Why a run has no role `reward_model`."""


def inactive_roles(config: Any) -> dict[str, str]:
    """Map each role that a run does not need to the reason; `config` may be the composed tree."""
    inactive = {}
    estimator = get_registry("advantage estimator").look_up(config.algorithm.adv_estimator)
    if has_only_teacher(config) or "values" not in inspect.signature(estimator).parameters:
        inactive["critic"] = why_no_critic(config)
    if not (config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss):
        inactive["ref"] = "there is no KL in the reward or the loss"
    if not model_rewards(config):
        inactive["reward_model"] = NO_REWARD_MODEL
    if not has_teacher(config):
        inactive["teacher"] = "there is no distillation.teacher_model.model_path"
    return inactive


def extra_roles(config: Any) -> dict[str, tuple[str, str]]:
    """Map roles of further models in `reward.list` to (class, role whose pool they share)."""
    further = [role for role in model_rewards(config) if role != "reward_model"]
    return dict.fromkeys(further, (REWARD_MODEL_WORKER, "reward_model"))


def complete(
    config: P, keys: Collection[str], inexact_weights: str = ""
) -> tuple[P, Sequence[str]]:
    """Choose the mini-batch size, pass sizing and correction if the user did not set them.

    `inexact_weights` says why the rollout's weights may differ from the trainer's; "" if they
    cannot.
    """
    notices = []
    size = config.data.train_batch_size
    if MINI_BATCH not in keys and size > 0:  # largest divisor up to the default
        most = min(config.actor_rollout_ref.actor.ppo_mini_batch_size, size)
        largest = next(n for n in range(most, 0, -1) if size % n == 0)
        config = replace_keys(config, {MINI_BATCH: largest})

    inactive = inactive_roles(config)
    set_keys = [key for key, role in ROWS_OF_A_PASS.items() if key in keys and role not in inactive]
    if set_keys and BY_TOKENS not in keys:
        config = replace_keys(config, {BY_TOKENS: False})
        notices.append(
            f"note: {set_keys[0]} counts samples, so passes are sized by samples "
            f"({BY_TOKENS}=false). Without this key they are sized by tokens, which is usually "
            "faster"
        )

    # Truncated importance weights per token decouple the objective: PPO's ratio compares with the
    # policy before the update, and the weight corrects for the policy that sampled the token.
    reason = inexact_weights or needs_correction(config)
    correction = config.algorithm.rollout_correction
    is_set = any(key == "correction" or key.startswith(CORRECTION) for key in keys)
    if reason and not is_set and correction == RolloutCorrectionConfig():
        config = replace_keys(config, {f"{CORRECTION}.rollout_is": "token"})
        notices.append(
            f"note: {reason}, so {CORRECTION}.rollout_is=token (at most "
            f"{correction.rollout_is_threshold}) is set, as by correction=decoupled_token_is; "
            "correction=disabled turns it off"
        )
    is_by_process = config.algorithm.adv_estimator == "grpo_process"
    if is_by_process and has_environment(config) and not has_only_teacher(config):
        notices.append(
            "note: algorithm.adv_estimator=grpo_process is biased where the policy chooses its "
            "number of steps, as in an environment; rloo_process is not"
        )
    return config, notices


def needs_correction(config: PPOConfig) -> str:
    """Return why quantized weights need a correction; "" if they do not."""
    rollout = config.actor_rollout_ref.rollout
    key, quantization = "quantization", rollout.quantization
    if not quantization and rollout.name == "vllm":
        key, quantization = "engine_kwargs.quantization", rollout.engine_kwargs.get("quantization")
    if quantization and not rollout.server_urls:
        return f"actor_rollout_ref.rollout.{key}={quantization} rounds the rollout's weights"
    return ""


def check(config: PPOConfig) -> list[str]:
    """Run the checks across PPO's keys, and return warnings about them."""
    from trainer.ppo.config_errors import reject  # slow imports: load torch
    from trainer.ppo.config_warnings import contradictions

    reject(config)
    return [f"warning [{name}]: {text}" for name, text in contradictions(config)]


PPO = Recipe(
    name="ppo",
    schema=PPOConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="ppo_trainer",
    placements=PLACEMENTS,
    inactive_roles=inactive_roles,
    extra_roles=extra_roles,
    registries=("trainer.ppo.advantages", "workers.losses", "workers.training.optim"),
    complete=complete,
    checks=(check,),
    translate=translate,
    settings_of_configuration=settings_of_configuration,
)


@overload
def load_config(overrides: Sequence[str] | Mapping[str, Any]) -> PPOConfig: ...
@overload
def load_config(overrides: Sequence[str] | Mapping[str, Any], recipe: Recipe[C]) -> C: ...
def load_config(overrides: Sequence[str] | Mapping[str, Any], recipe: Recipe[Any] = PPO) -> Any:
    """Return the checked configuration of a run.

        config = load_config(["data.train_files=a.parquet", "actor_rollout_ref.model.path=m"])
        config.data.train_batch_size        # 1024

    Args:
        overrides: `key=value` strings, as on the command line, or a dict of key -> value.
        recipe: a `Recipe`, such as `verl_like.extend.EVAL`. The result is an object of its schema:
            `PPOConfig` for PPO.

    Raises:
        ConfigError: a key or value is wrong or missing, or the settings cannot work together.
    """
    return compose.load_config(overrides, recipe)
