"""The configuration of a server: a run's keys, of which those in `never_read` have no effect.

`load_config(overrides, SERVE)` returns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.schema import Recipe, RunConfig, TrainerConfig, placement_presets
from trainer.ppo.config import AlgorithmConfig
from trainer.ppo.verl_keys import translate
from verl_like.config_key import Section, config_field
from verl_like.errors import ConfigError
from verl_like.files import is_remote
from verl_like.placement.pools import expand_roles
from workers.config import WorkersConfig

CLIENTS_SAY = "each request sets it"
CLIENTS_LOOP = "the loop and the rewards are in the client's script"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(kw_only=True)
class ServeDataConfig(Section):
    """Limits on the lengths of requests."""

    max_prompt_length: int = config_field(512, above=0)
    """Longest prompt of a sample, in tokens."""
    max_response_length: int = config_field(512, above=0)
    """Longest response of a sample. Rows to train on may be as long as both together."""


@dataclass(kw_only=True)
class ServeConfig(RunConfig, WorkersConfig):
    """A server of one base model."""

    never_read = {
        CLIENTS_SAY: (
            "algorithm",
            *(f"{ACTOR}.{name}" for name in ("ppo_mini_batch_size", "ppo_epochs", "grad_clip")),
            *(f"{ACTOR}.optim.{name}" for name in ("lr", "betas", "weight_decay")),
            *(f"critic.{name}" for name in ("ppo_mini_batch_size", "ppo_epochs", "grad_clip")),
            *(f"{ROLLOUT}.{name}" for name in ("n", "temperature", "top_k", "top_p", "do_sample")),
            *(f"{ROLLOUT}.{name}" for name in ("sampling_kwargs", "val_kwargs")),
        ),
        CLIENTS_LOOP: (
            *("reward.function", "reward.max_failed_fraction", "reward.trust_programs"),
            *("reward.sandbox", "environment"),
            *("ptx", "distillation", "trainer.cls", "trainer.stop_at", "trainer.logger"),
            *("trainer.total_epochs", "trainer.total_training_steps", "trainer.test_freq"),
            *("trainer.val_before_train", "trainer.save_freq", "trainer.save_every_minutes"),
            *("trainer.save_final", "trainer.resume_mode", "trainer.resume_from_path"),
        ),
    }
    data: ServeDataConfig = config_field(factory=ServeDataConfig)
    """Longest prompt and longest response of a client's requests."""
    algorithm: AlgorithmConfig = config_field(
        factory=partial(AlgorithmConfig, adv_estimator="grpo")
    )
    """Not read by a server."""
    trainer: TrainerConfig = config_field(
        factory=partial(
            TrainerConfig,
            backend="local",
            experiment_name="serve",
            default_local_dir="runs/verl_like/serve",
        )
    )
    """Devices, seed, and the folder of checkpoints."""


def prepare(config: Any) -> None:
    """Reject missing models, contexts that are too short, and unsupported shardings and engines."""
    from trainer.config.checks import check_axes_of, check_ranks
    from trainer.ppo.roles import declared_models
    from trainer.rollouts.preflight import check_model, check_rollout
    from workers.models.memory_shapes import check_adapter
    from workers.rollout.build_engine import check_quantization

    for role, model in declared_models(config).items():
        check_ranks(config, role, model.sharding)
        check_model(config, model.key, model.model.path, may_be_random=model.head != "score")
        check_axes_of(config, role, model)
        check_adapter(model.model, model.head)
    check_quantization(config.actor_rollout_ref.rollout, config.trainer.device)
    check_rollout(config)


def unplaced_roles(config: ServeConfig) -> dict[str, str]:
    """Return the optional roles that no pool has."""
    placed = expand_roles(config.role_mapping)
    optional = ("ref", "critic", "reward_model")
    return {role: f"role_mapping has no {role}" for role in optional if role not in placed}


def check_folder(config: ServeConfig) -> None:
    """Reject a run folder in an object store: clients save when they want, without a loop."""
    if is_remote(config.trainer.default_local_dir):
        raise ConfigError(
            f"trainer.default_local_dir={config.trainer.default_local_dir}: verl-like serve saves "
            "only on this machine's file systems. Set a local folder."
        )


SERVE = Recipe(
    name="serve",
    schema=ServeConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="serve",
    placements=placement_presets({"actor_pool": ["actor"], "rollout_pool": ["rollout"]}),
    inactive_roles=unplaced_roles,
    registries=("trainer.ppo.advantages", "workers.losses", "workers.training.optim"),
    translate=translate,
    checks=(check_folder,),
)
