"""The configuration tree of an asynchronous run: PPO's tree and the section `async_training`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from trainer.async_training.topology import ANY_RANK, CRITIC_COPY, Topology, generator_role, role_on
from trainer.ppo.config import PPOConfig, PPOTrainerConfig
from trainer.ppo.recipe import REWARD_MODEL_WORKER, inactive_roles
from verl_like.config_key import ReadWhen, Section, config_field, replace_keys
from verl_like.placement.pools import expand_roles
from workers.config import RolloutConfig, model_rewards
from workers.config.conditions import SAVES

GENERATOR_SETTINGS = "async_training.generator_settings"
ROLLOUT = "actor_rollout_ref.rollout"
ROLLOUT_WORKER = "workers.roles.rollout.RolloutWorker"
REFERENCE_WORKER = "workers.roles.reference.ReferenceWorker"
CRITIC_COPY_WORKER = "workers.roles.critic.CriticCopyWorker"
ASYNC_TRAINER = "trainer.async_training.step.AsyncTrainer"
"""The trainer of an asynchronous run; a user's trainer is a subclass of it."""
MAY_JOIN = ReadWhen(
    "there are several generators, on Ray",
    lambda async_training, run: async_training.generators > 1 and run.trainer.backend == "ray",
    "async_training.generators is 1, or trainer.backend is not ray",
)
HAS_MAX_AGE = ReadWhen(
    "`sampler` is version_window or your own",
    lambda async_training, _: (
        async_training.sampler == "version_window" or "." in async_training.sampler
    ),
    "async_training.sampler is not version_window",
)


@dataclass(kw_only=True)
class GeneratorSettings(Section):
    """Settings of a generator that differ from `actor_rollout_ref.rollout`; null: no difference."""

    name: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    max_num_seqs: int | None = None
    kv_cache_gib: float | None = None
    max_tokens_per_call: int | None = None
    tensor_model_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None

    def chosen(self) -> dict[str, Any]:
        """Return the keys that are not null, with their values."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(kw_only=True)
class AsyncSettings(Section):
    """Generators, trainers, and the buffer between them."""

    topology: str | None = config_field(None, allows="a name such as 2m1t")
    """`2m1t` sets `generators=2 trainers=1`, as in ColossalChat."""
    generators: int = config_field(1, above=0)
    """Number of generators, each on its own pool (roles `rollout`, `rollout_1`, ...)."""
    min_generators: int | None = config_field(
        None,
        above=0,
        hint="or null to start only with all generators",
        read_when=MAY_JOIN,
        may_change_on_resume=True,
    )
    """The run starts with as many generators as have room, at least these; others join when nodes
    do (`verl-like join`), and leave with their nodes. null: all generators are needed."""
    trainers: int = config_field(1, above=0)
    """Number of trainer ranks."""
    sample_routes: list[list[int]] | None = config_field(
        None, allows="a list of [generator, trainer]"
    )
    """Which trainer ranks get the samples of each generator; null distributes them evenly."""
    weight_routes: list[list[int]] | None = config_field(
        None, allows="a list of [trainer, generator]"
    )
    """Which generators get the weights of each trainer rank; null distributes them evenly."""
    generator_settings: dict[Any, GeneratorSettings] = config_field(
        factory=dict, allows=f"{{generator index: {{{', '.join(vars(GeneratorSettings()))}}}}}"
    )
    """Settings that override `actor_rollout_ref.rollout` for the generator with this index."""
    prompts_per_call: int | None = config_field(
        None, above=0, hint="or null to divide a batch among generators"
    )
    """Prompts per call of a generator; null divides each batch among the generators."""
    max_inflight_samples: int | None = config_field(
        None, above=0, hint="or null for as many as max_staleness allows"
    )
    """Maximum number of samples that are queued or in generation; null: as many as `max_staleness`
    allows.
    """
    on_buffer_full: str = config_field("wait", choices=("wait", "evict_oldest"))
    """If the buffer is full, a generator waits or evicts the oldest samples."""
    sampler: str = config_field("in_order", registry="sampler")
    """Sampler, which chooses the buffered samples of the next batch."""
    drop_older_than: int | None = config_field(
        None, at_least=0, hint="or null for max_staleness", read_when=HAS_MAX_AGE
    )
    """Drop buffered samples that are more than this many weight versions old; null:
    `max_staleness`.
    """
    max_staleness: int = config_field(1, at_least=0)
    """Maximum staleness of a sample, in weight versions; with 0 and `update_steps=1`, the run is
    synchronous.
    """
    score_on: str = config_field("trainer", choices=("trainer", "generator"))
    """Run reference, reward models and critic with the trainers, or with each generator."""
    weight_update: str = config_field("between_batches", choices=("between_batches", "immediate"))
    """Generators load new weights between calls, or immediately, within a call."""
    update_steps: int = config_field(1, above=0)
    """Batches to train on per weight version."""
    train_epochs: int = config_field(1, above=0)
    """Passes over the batches of a weight version, reshuffled from the second pass on."""
    on_generator_failure: str = config_field(
        "fail", choices=("fail", "continue", "restart"), may_change_on_resume=True
    )
    """If a generator dies, end the run, give its prompts to the others, or restart it."""
    on_resume: str = config_field(
        "regenerate", choices=("regenerate", "restore"), read_when=SAVES, may_change_on_resume=True
    )
    """Generate queued samples again after a resume, or store them in the checkpoint."""
    warn_after_idle_s: float = config_field(120.0, above=0, may_change_on_resume=True)
    """Seconds without a batch after which a warning is logged."""
    log_syncs: bool = config_field(False, may_change_on_resume=True)
    """Log weight deliveries to `syncs.jsonl`."""


@dataclass(kw_only=True)
class AsyncTrainerConfig(PPOTrainerConfig):
    """Keys of the section `trainer` of an asynchronous run."""

    cls: str = config_field(ASYNC_TRAINER, allows="a dotted path", may_change_on_resume=False)
    """Trainer class: AsyncTrainer or a subclass."""
    max_restarts: int = config_field(0, at_least=0)
    """Maximum number of automatic restarts from the last checkpoint; 0 disables restarts. If a
    generator dies, `async_training.on_generator_failure` applies.
    """
    experiment_name: str = config_field("async", allows="a name")
    """Name of the run in W&B and trackio; second part of the default run folder."""


@dataclass(kw_only=True)
class AsyncConfig(PPOConfig):
    """A run that generates and trains at the same time."""

    pool_keys = "async_training.generators, async_training.trainers or resource_pool_spec"
    generates_while_training = True

    async_training: AsyncSettings = config_field(factory=AsyncSettings)
    """Generators, trainers, and the buffer between them."""
    trainer: AsyncTrainerConfig = config_field(factory=AsyncTrainerConfig)
    """Length, devices, checkpoints and logging of the run."""

    @property
    def child_pools(self) -> frozenset[str]:
        """The pools of the generators, which generate while the trainers train."""
        pools = expand_roles(self.role_mapping)
        return frozenset(
            pools[generator_role(generator)] for generator in range(self.async_training.generators)
        )

    @property
    def optional_pools(self) -> Sequence[str]:
        """The pools of generators beyond `min_generators`."""
        fewest, pools = self.async_training.min_generators, expand_roles(self.role_mapping)
        if fewest is None:
            return ()
        numbers = range(fewest, self.async_training.generators)
        return [pools[generator_role(number)] for number in numbers]

    @property
    def takes_weights_at_once(self) -> bool:
        """True if new weights may arrive in the middle of a generation."""
        return self.async_training.weight_update == "immediate"

    @property
    def topology(self) -> Topology:
        """The routes of samples and weights."""
        async_training = self.async_training
        edges = async_training.sample_routes, async_training.weight_routes
        return Topology.of(async_training.generators, async_training.trainers, *edges)

    @property
    def steps_per_version(self) -> int:
        """Number of steps of a round, after which new weights are published."""
        return self.async_training.update_steps * self.steps_per_batch

    @property
    def steps_per_batch(self) -> int:
        """Number of steps that train on the same samples."""
        return self.async_training.train_epochs

    @property
    def samples_per_batch(self) -> int:
        """Number of samples per step."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n

    @property
    def chunk_size(self) -> int:
        """Number of prompts per chunk: as configured, or the batch divided by the generators."""
        prompts = self.async_training.prompts_per_call
        return self.topology.chunk_size(self.data.train_batch_size) if prompts is None else prompts

    def chunks_in_parallel(self, generator: int) -> int:
        """Number of chunks that a generator starts together."""
        if self.async_training.prompts_per_call is not None or self.topology.routed_ranks == [
            ANY_RANK
        ]:
            return 1
        return len(self.topology.trainers_of[generator])

    @property
    def score_roles(self) -> dict[str, str]:
        """Maps roles with which generators score, by their name at generator 0, to classes."""
        if self.async_training.score_on == "trainer":
            return {}
        inactive, roles = inactive_roles(self), {}
        if "ref" not in inactive:
            roles["ref"] = REFERENCE_WORKER
        if "critic" not in inactive:
            roles[CRITIC_COPY] = CRITIC_COPY_WORKER
        return roles | dict.fromkeys(model_rewards(self), REWARD_MODEL_WORKER)

    @property
    def generator_roles(self) -> dict[str, tuple[str, int]]:
        """Maps every role of every generator to (its name at generator 0, generator number)."""
        generators, kinds = range(self.async_training.generators), ["rollout", *self.score_roles]
        return {
            role_on(kind, generator): (kind, generator)
            for generator in generators
            for kind in kinds
        }

    def kind_of(self, role: str) -> str:
        """Return what a generator's role is called at generator 0, such as `ref` for `ref_1`."""
        return self.generator_roles.get(role, (role, 0))[0]

    def for_role(self, role: str) -> Self:
        """Return the configuration of a role, with the `generator_settings` of its generator.

        The reward models of generators after the first get only their own entry in `reward.list`.
        """
        kind, generator = self.generator_roles.get(role, (role, 0))
        if kind != role and self.reward.list and kind in model_rewards(self):
            return replace_keys(self, {"reward.list": [model_rewards(self)[kind]]})
        settings = self.async_training.generator_settings.get(generator)
        if kind != "rollout" or settings is None:
            return self
        policy = self.actor_rollout_ref
        rollout = dataclasses.replace(policy.rollout, **settings.chosen())
        of_generator = dataclasses.replace(policy, rollout=rollout)
        return dataclasses.replace(self, actor_rollout_ref=of_generator)

    def rollout_of(self, generator: int) -> RolloutConfig:
        """Return the rollout settings of a generator, with its `generator_settings`."""
        return self.for_role(generator_role(generator)).actor_rollout_ref.rollout

    def validators(self, living: Sequence[int]) -> list[int]:
        """Return the generators that validate: those with the same settings as the first live one.

        With `async_training.score_on=generator`, the first of them also scores the validation.
        """
        generators = living or [0]
        first = self.rollout_of(generators[0])
        return [generator for generator in generators if self.rollout_of(generator) == first]


def open_at_once(config: AsyncConfig) -> int:
    """Return the maximum number of samples that may be queued or in generation."""
    async_training = config.async_training
    num_batches = (async_training.max_staleness + 1) * async_training.update_steps
    return min(
        async_training.max_inflight_samples or sys.maxsize, num_batches * config.samples_per_batch
    )
