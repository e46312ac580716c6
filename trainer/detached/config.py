"""The whole configuration tree of a detached run: PPO's, and the section `detached`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.detached.topology import Topology, maker_role, role_on
from trainer.ppo.config import PPOConfig, PPOTrainerConfig
from trainer.ppo.sizes import CRITIC_COPY
from verl_like.config_key import When, key, when
from verl_like.errors import ConfigError, nearest
from verl_like.placement.roles import expand_roles
from workers.config import RolloutConfig, model_rewards
from workers.config.conditions import SAVES

MAKER_SETTINGS = "detached.maker_settings"
ROLLOUT = "actor_rollout_ref.rollout"


def by_number(maker_settings: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings by the number of their maker, as text: `{1: ...}` of a dict or of YAML is `.1`
    of a command.
    """
    found: dict[str, Any] = {}
    for maker, settings in maker_settings.items():
        if str(maker) in found:
            raise ConfigError(
                f"{MAKER_SETTINGS} names maker {maker} twice: {found[str(maker)]} and {settings}. "
                "Say all of it in one."
            )
        found[str(maker)] = settings
    return found


def own_rollout(rollout: RolloutConfig, maker: str, settings: Any) -> RolloutConfig:
    """The rollout of a maker: the run's, with these settings, which have the types of its keys."""
    where = f"{MAKER_SETTINGS}.{maker}"
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{where}={settings!r} is no setting of a rollout: give keys of {ROLLOUT} with "
            f"their values, as in {where}={{name: hf}}."
        )
    known = [field.name for field in dataclasses.fields(RolloutConfig)]
    typed = OmegaConf.structured(RolloutConfig)
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"{where} names {name!r}, no key of rollout.{nearest(name, known)}")
        try:
            OmegaConf.update(typed, name, value)
        except OmegaConfBaseException as error:
            why = str(error).partition("\n")[0]  # the rest are OmegaConf's own names
            raise ConfigError(f"{where}.{name}={value}: {why}. See {ROLLOUT}.{name}.") from error
    own = OmegaConf.to_object(typed)
    return dataclasses.replace(rollout, **{name: getattr(own, name) for name in settings})


OWN_TRAINER = "trainer.detached.step.DetachedTrainer"
"""The trainer of a detached run, or what a user's is a subclass of."""
BY_NUMBERS = when("topology", None, otherwise="detached.topology gives the numbers")
HAS_WINDOW = When(
    "`sampler` is version_window or your own",
    lambda detached, _: detached.sampler == "version_window" or "." in detached.sampler,
    "detached.sampler is not version_window",
)


@dataclass(kw_only=True)
class DetachedSettings:
    """Makers, trainers, and the buffer between them."""

    topology: str | None = key(None, allows="a name such as 2m1t")
    """Numbers of makers and trainers in a word."""
    makers: int = key(1, above=0, read_when=BY_NUMBERS)
    """Groups that generate, each on a pool of its own: roles `rollout`, `rollout_1`, ..."""
    trainers: int = key(1, above=0, read_when=BY_NUMBERS)
    """Ranks of the group that learns."""
    edges: list[list[int]] | None = key(None, allows="a list of [maker, trainer]")
    """Whose samples go to which trainer rank; null is an even graph."""
    weight_edges: list[list[int]] | None = key(None, allows="a list of [trainer, maker]")
    """Which trainer rank sends its weights to whom; null is an even graph."""
    maker_settings: dict[Any, Any] = key(
        factory=dict, allows="number of a maker: {key of actor_rollout_ref.rollout: value}"
    )
    """How a maker generates, where that is not as `actor_rollout_ref.rollout` says."""
    prompts_per_piece: int | None = key(None, above=0, hint="or null for a batch in equal parts")
    """Prompts that a maker answers in one call; null shares every batch out among the makers."""
    limit: int | None = key(None, above=0, hint="or null for what max_staleness lets be open")
    """Samples that may be open at once, queued or being made."""
    when_full: str = key("wait", choices=("wait", "evict_oldest"))
    """What a maker does where the buffer is full: wait, or push the oldest samples out."""
    sampler: str = key("in_order", registry="sampler")
    """Which of the samples in the buffer become the next batch."""
    window: int | None = key(
        None, at_least=0, hint="or null for max_staleness", read_when=HAS_WINDOW
    )
    """Versions that the samples of a batch may be old; older ones are dropped."""
    max_staleness: int = key(1, at_least=0)
    """Versions of the weights between the draw of a sample and the update that trains on it; makers
    wait rather than make what could become older. 0 is the synchronous run.
    """
    score_on: str = key("trainer", choices=("trainer", "maker"))
    """Where reference, reward models and values stand: on the trainers' pool, or beside each
    rollout, on its devices, with a copy of the critic.
    """
    new_weights: str = key("at_boundary", choices=("at_boundary", "at_once"))
    """When a maker takes newer weights: between two pieces, or in the middle of one."""
    update_steps: int = key(1, above=0)
    """Batches that are trained on between two versions of the weights."""
    train_epochs: int = key(1, above=0)
    """Times that each of these batches is trained on, from the second on in a new order."""
    on_maker_loss: str = key(
        "fail", choices=("fail", "continue", "restart"), may_change_on_resume=True
    )
    """What a maker's death means: the run ends; the others take its prompts; it is started anew."""
    on_resume: str = key(
        "regenerate",
        choices=("regenerate", "restore"),
        read_when=SAVES,
        may_change_on_resume=True,
    )
    """What becomes of samples that were queued when a checkpoint was written: they are made again,
    or are kept in it.
    """
    stall_s: float = key(120.0, above=0, may_change_on_resume=True)
    """Seconds without a batch after which it is said who waits for whom."""
    debug: bool = key(False, may_change_on_resume=True)
    """Write bytes, seconds and memory of every delivery of weights to `syncs.jsonl`."""


@dataclass(kw_only=True)
class DetachedTrainerConfig(PPOTrainerConfig):
    """The run: length, devices, folder."""

    cls: str = key(OWN_TRAINER, allows="a dotted path", may_change_on_resume=False)
    """Dotted path of the trainer: DetachedTrainer, or a subclass that overrides stages or hooks."""
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
    def piece_size(self) -> int:
        """Prompts of a piece: as configured, or a batch in equal parts for the makers."""
        asked = self.detached.prompts_per_piece
        return self.topology.piece_size(self.data.train_batch_size) if asked is None else asked

    def kind_of(self, role: str) -> str:
        """What maker 0 calls the role of another maker."""
        further = range(1, self.detached.makers)
        kinds = {role_on(kind, maker): kind for kind in self._maker_kinds for maker in further}
        return kinds.get(role, role)

    def reads_in(self, role: str) -> str:
        """Makers read their samples as they make them."""
        return "gen" if role in self._maker_kinds else super().reads_in(role)

    def prompts_per_call(self, role: str) -> int:
        """Of a maker's roles a piece."""
        if self.kind_of(role) in self._maker_kinds:
            return self.piece_size
        return super().prompts_per_call(role)

    @property
    def _maker_kinds(self) -> list[str]:
        """Roles that every maker may have."""
        if self.detached.score_on == "trainer":
            return ["rollout"]
        return ["rollout", "ref", CRITIC_COPY, *model_rewards(self)]

    def of_role(self, role: str) -> DetachedConfig:
        """With `detached.maker_settings` for a maker that has some; a further maker's reward model
        is told the one reward that is its.
        """
        kind = self.kind_of(role)
        if kind != role and self.rewards and kind in model_rewards(self):
            return dataclasses.replace(self, rewards=[model_rewards(self)[kind]])
        for maker, settings in self.detached.maker_settings.items():
            if role == maker_role(int(maker)):
                policy = self.actor_rollout_ref
                rollout = own_rollout(policy.rollout, maker, settings)
                return dataclasses.replace(
                    self, actor_rollout_ref=dataclasses.replace(policy, rollout=rollout)
                )
        return self

    def rollout_of(self, maker: int) -> RolloutConfig:
        """The settings of a maker's rollout, its own ones included."""
        return self.of_role(maker_role(maker)).actor_rollout_ref.rollout


def samples_per_batch(config: DetachedConfig) -> int:
    """Samples of a step."""
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.n


def open_samples(config: DetachedConfig) -> int:
    """Samples that the bound of staleness lets be open while the trainer waits for a batch."""
    detached = config.detached
    return (detached.max_staleness + 1) * detached.update_steps * samples_per_batch(config)


def open_at_once(config: DetachedConfig) -> int:
    """Samples that staleness and the buffer let be queued or in the making."""
    limit = config.detached.limit
    return open_samples(config) if limit is None else min(limit, open_samples(config))


def idle_makers(config: DetachedConfig) -> int:
    """Makers for whom no piece is left, so few are open at once."""
    topology = config.topology
    samples_per_piece = config.piece_size * config.actor_rollout_ref.rollout.n
    num_open = open_at_once(config) // len(topology.routed_ranks) // samples_per_piece
    busy: set[int] = set()
    for rank in topology.routed_ranks:
        busy.update(topology.makers_for(rank)[:num_open])
    return topology.makers - len(busy)
