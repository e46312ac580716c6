"""The whole configuration tree of a detached run: PPO's, and the section `detached`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.detached.topology import ANY_RANK, Topology, maker_role, role_on
from trainer.ppo.config import PPOConfig, PPOTrainerConfig
from trainer.ppo.recipe import REWARD_MODEL_WORKER, inactive_roles
from trainer.ppo.sizes import CRITIC_COPY
from verl_like.config_key import Section, When, key, when
from verl_like.placement.roles import expand_roles
from workers.config import RolloutConfig, model_rewards
from workers.config.conditions import SAVES

MAKER_SETTINGS = "detached.maker_settings"
ROLLOUT = "actor_rollout_ref.rollout"
ROLLOUT_WORKER = "workers.roles.rollout.RolloutWorker"
REFERENCE_WORKER = "workers.roles.reference.ReferenceWorker"
CRITIC_COPY_WORKER = "workers.roles.critic_copy.CriticCopyWorker"
OWN_TRAINER = "trainer.detached.step.DetachedTrainer"
"""The trainer of a detached run, or what a user's is a subclass of."""
BY_NUMBERS = when("topology", None, otherwise="detached.topology gives the numbers")
HAS_WINDOW = When(
    "`sampler` is version_window or your own",
    lambda detached, _: detached.sampler == "version_window" or "." in detached.sampler,
    "detached.sampler is not version_window",
)


@dataclass(kw_only=True)
class MakerSettings(Section):
    """What a maker has otherwise than `actor_rollout_ref.rollout` says; null: as that says."""

    name: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    max_num_seqs: int | None = None
    kv_cache_gb: float | None = None
    max_new_tokens_per_call: int | None = None
    tensor_model_parallel_size: int | None = None
    gpu_memory_utilization: float | None = None

    def chosen(self) -> dict[str, Any]:
        """The keys that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(kw_only=True)
class DetachedSettings(Section):
    """Makers, trainers, and the buffer between them."""

    topology: str | None = key(None, allows="a name such as 2m1t")
    """Numbers of makers and trainers."""
    makers: int = key(1, above=0, read_when=BY_NUMBERS)
    """Groups that generate, each on its own pool: roles `rollout`, `rollout_1`, ..."""
    trainers: int = key(1, above=0, read_when=BY_NUMBERS)
    """Ranks that train."""
    edges: list[list[int]] | None = key(None, allows="a list of [maker, trainer]")
    """Which maker's samples go to which trainer rank; null: even."""
    weight_edges: list[list[int]] | None = key(None, allows="a list of [trainer, maker]")
    """Which trainer rank sends weights to which maker; null: even."""
    maker_settings: dict[Any, MakerSettings] = key(
        factory=dict, allows=f"number of a maker: {{{', '.join(vars(MakerSettings()))}}}"
    )
    """Settings of a maker that differ from `actor_rollout_ref.rollout`."""
    prompts_per_piece: int | None = key(None, above=0, hint="or null for a batch in equal parts")
    """Prompts per call of a maker; null divides each batch among the makers."""
    limit: int | None = key(None, above=0, hint="or null for what max_staleness lets be open")
    """Samples open at once, queued or in generation."""
    when_full: str = key("wait", choices=("wait", "evict_oldest"))
    """If the buffer is full, a maker waits or evicts the oldest samples."""
    sampler: str = key("in_order", registry="sampler")
    """Which buffered samples become the next batch."""
    window: int | None = key(
        None, at_least=0, hint="or null for max_staleness", read_when=HAS_WINDOW
    )
    """Largest age of samples in versions; older ones are dropped."""
    max_staleness: int = key(1, at_least=0)
    """Largest lag, in weight versions, from generating a sample to training on it; 0 is the
    synchronous run.
    """
    score_on: str = key("trainer", choices=("trainer", "maker"))
    """Where reference, reward models and critic score: with the trainers, or with each maker.
    """
    new_weights: str = key("at_boundary", choices=("at_boundary", "at_once"))
    """When a maker takes new weights: between calls, or within one."""
    update_steps: int = key(1, above=0)
    """Batches trained on per weight version."""
    train_epochs: int = key(1, above=0)
    """Passes over these batches, reshuffled from the second on."""
    on_maker_loss: str = key(
        "fail", choices=("fail", "continue", "restart"), may_change_on_resume=True
    )
    """If a maker dies: end the run, give its prompts to the others, or restart it."""
    on_resume: str = key(
        "regenerate",
        choices=("regenerate", "restore"),
        read_when=SAVES,
        may_change_on_resume=True,
    )
    """Samples queued at a checkpoint: generate them again, or store them."""
    stall_s: float = key(120.0, above=0, may_change_on_resume=True)
    """Seconds without a batch until the log says who waits for whom."""
    debug: bool = key(False, may_change_on_resume=True)
    """Log bytes, seconds and memory of weight deliveries to `syncs.jsonl`."""


@dataclass(kw_only=True)
class DetachedTrainerConfig(PPOTrainerConfig):
    """The run: length, devices, folder."""

    cls: str = key(OWN_TRAINER, allows="a dotted path", may_change_on_resume=False)
    """Trainer class: DetachedTrainer or a subclass."""
    max_restarts: int = key(0, at_least=0)
    """Times that a run goes on by itself from its last checkpoint; a maker alone is
    `detached.on_maker_loss`."""
    experiment_name: str = key("detached", allows="a name")
    """Second part of the run folder's name."""


@dataclass(kw_only=True)
class DetachedConfig(PPOConfig):
    """A run whose samples are made beside the training."""

    detached: DetachedSettings = key(factory=DetachedSettings)
    """Makers, trainers, and the buffer between them."""
    trainer: DetachedTrainerConfig = key(factory=DetachedTrainerConfig)
    """The run."""

    @property
    def child_pools(self) -> frozenset[str]:
        """Makers' pools: they generate while the driver trains."""
        pools = expand_roles(self.role_mapping)
        return frozenset(pools[maker_role(maker)] for maker in range(self.detached.makers))

    @property
    def num_maker_ranks(self) -> int:
        """Ranks of all makers."""
        return sum(sum(self.resource_pool_spec[pool]) for pool in self.child_pools)

    @property
    def generates_beside_training(self) -> bool:
        """Whether a rollout generates while the trainer trains."""
        return True

    @property
    def takes_weights_at_once(self) -> bool:
        """Whether new weights may arrive in the middle of a generation."""
        return self.detached.new_weights == "at_once"

    @property
    def topology(self) -> Topology:
        """Who sends what to whom."""
        detached = self.detached
        edges = detached.edges, detached.weight_edges
        return Topology.of(detached.makers, detached.trainers, *edges)

    @property
    def steps_per_version(self) -> int:
        """Steps of a round, which a version of the weights ends."""
        return self.detached.update_steps * self.detached.train_epochs

    @property
    def piece_size(self) -> int:
        """Prompts of a piece: as configured, or a batch in equal parts for the makers."""
        prompts = self.detached.prompts_per_piece
        return self.topology.piece_size(self.data.train_batch_size) if prompts is None else prompts

    def pieces_at_once(self, maker: int) -> int:
        """Pieces that a maker begins together: where a batch is in equal parts, all of its part."""
        if self.detached.prompts_per_piece is not None or self.topology.routed_ranks == [ANY_RANK]:
            return 1
        return len(self.topology.trainers_of(maker))

    @property
    def score_roles(self) -> dict[str, str]:
        """Roles with which every maker scores, as maker 0 has them -> their classes."""
        if self.detached.score_on == "trainer":
            return {}
        inactive, roles = inactive_roles(self), {}
        if "ref" not in inactive:
            roles["ref"] = REFERENCE_WORKER
        if "critic" not in inactive:
            roles[CRITIC_COPY] = CRITIC_COPY_WORKER
        return roles | dict.fromkeys(model_rewards(self), REWARD_MODEL_WORKER)

    @property
    def maker_roles(self) -> dict[str, tuple[str, int]]:
        """Every role of every maker -> its name at maker 0, and the maker's number."""
        makers, kinds = range(self.detached.makers), ["rollout", *self.score_roles]
        return {role_on(kind, maker): (kind, maker) for maker in makers for kind in kinds}

    def kind_of(self, role: str) -> str:
        """What maker 0 calls the role of another maker."""
        return self.maker_roles.get(role, (role, 0))[0]

    def reads_in(self, role: str) -> str:
        """Makers read their samples as they make them."""
        return "gen" if role in ("rollout", *self.score_roles) else super().reads_in(role)

    def prompts_per_call(self, role: str) -> int:
        """Of a maker's roles a piece."""
        return self.piece_size if role in self.maker_roles else super().prompts_per_call(role)

    def of_role(self, role: str) -> DetachedConfig:
        """With `detached.maker_settings` for a maker that has some; a further maker's reward model
        is told the one reward that is its.
        """
        kind, maker = self.maker_roles.get(role, (role, 0))
        if kind != role and self.rewards and kind in model_rewards(self):
            return dataclasses.replace(self, rewards=[model_rewards(self)[kind]])
        settings = self.detached.maker_settings.get(maker)
        if kind != "rollout" or settings is None:
            return self
        policy = self.actor_rollout_ref
        rollout = dataclasses.replace(policy.rollout, **settings.chosen())
        of_maker = dataclasses.replace(policy, rollout=rollout)
        return dataclasses.replace(self, actor_rollout_ref=of_maker)

    def rollout_of(self, maker: int) -> RolloutConfig:
        """The settings of a maker's rollout, its own ones included."""
        return self.of_role(maker_role(maker)).actor_rollout_ref.rollout

    def validators(self, living: Sequence[int]) -> list[int]:
        """The makers that validate: those with the settings of the first maker that lives.

        With `detached.score_on=maker` that first maker also scores.
        """
        makers = living or [0]
        first = self.rollout_of(makers[0])
        return [maker for maker in makers if self.rollout_of(maker) == first]


def samples_per_batch(config: DetachedConfig) -> int:
    """Samples of a step."""
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.n


def open_at_once(config: DetachedConfig) -> int:
    """Samples that staleness and the buffer's limit let be queued or in the making."""
    detached = config.detached
    num_batches = (detached.max_staleness + 1) * detached.update_steps
    return min(detached.limit or sys.maxsize, num_batches * samples_per_batch(config))
