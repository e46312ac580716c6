"""Asynchronous PPO: the same stages, with a queue of samples in front.

    makers ─> bounded queue ─> score ─> advantages ─> { critic ‖ actor } ─> weights ─> makers

Makers generate in threads of their own (`maker`), and the trainer takes batches from the queue
(`buffer`). New weights are published, and each maker takes them when it can (`weights`). Read
`DetachedTrainer.step` first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.detached.activity import Activity
from trainer.detached.buffer import Demand, ExperienceBuffer
from trainer.detached.checks import check_start
from trainer.detached.config import MAKER_SETTINGS, DetachedConfig
from trainer.detached.maker import Maker
from trainer.detached.maker_losses import MakerLosses
from trainer.detached.maker_scores import MADE_BY_MAKERS
from trainer.detached.origins import Origins
from trainer.detached.plan import plan_lines
from trainer.detached.rounds import Rounds
from trainer.detached.topology import ANY_RANK, maker_role, role_on
from trainer.detached.weights import WeightFeed
from trainer.ppo.config import PPOConfig
from trainer.ppo.sample import number_rows, over_draws
from trainer.ppo.stages import PPOTrainer
from trainer.record import Call, Metrics, Run
from trainer.report.detached import log_in_words
from trainer.roadside.sample_log import SampleKey, SampleLog
from trainer.rollouts.preflight import check_rollout
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.samples import concat_rows
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.errors import ConfigError, few
from verl_like.files import write_whole
from verl_like.placement.roles import expand_roles
from workers.columns import count_ones
from workers.config import plays
from workers.rewards.weighted import Rewards

SAMPLES = "queued_samples"
"""The folder of a checkpoint that holds the queued samples."""
PAUSE_S = 600.0
"""How long a validation waits for makers to finish what they are generating."""
END_S = 10.0
"""How long the end of a run waits for makers; a failed run reports soon."""


@dataclass
class Draws:
    """The samples that a step has taken from the queue, in numbers."""

    uids: list[str] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    """Metrics of the makers' scores."""
    num_tokens: int = 0


class DetachedTrainer(PPOTrainer):
    """PPO's stages on samples that makers generate meanwhile."""

    config: DetachedConfig

    def __init__(self, run: Run, *inputs: Any) -> None:
        """The makers' threads start with the first step or validation."""
        super().__init__(run, *inputs)
        config, detached = self.config, self.config.detached
        self.topology, self.activity = config.topology, Activity()
        self.maker_roles = frozenset(config.maker_roles)
        self.rounds = Rounds(detached.update_steps, detached.train_epochs, config.trainer.seed)
        self.origins = Origins(self.topology.trainers)
        self.feed = WeightFeed(config, self.groups, self.topology)
        self.buffer = ExperienceBuffer(config, self.loader, self.activity, self.check_trainers)
        self.losses = MakerLosses(
            config, self.groups, self.init_arguments, self.is_ending, lambda: self.buffer.version
        )
        self.makers = [Maker(number, self) for number in range(self.topology.makers)]
        self._have_started = False
        self._round: list[DataProto] = []
        """The scored batches of this round, which later epochs train on again."""
        self._draws = Draws()
        self._validation_began = 0.0
        """When makers last came to rest for a validation, by `time.time`."""

    def make_rollouts(self, tokenizer: Any, rewards: Rewards) -> Rollouts:
        """Makers generate the samples of a validation."""
        return Rollouts(self, tokenizer, rewards, ask=self.validation_samples)

    # --------------------------------------------------------------------------- the step

    def step(self) -> Metrics:
        """One step: a batch of the queue, or one that returns in a later epoch of its round."""
        self.start_makers()
        is_fresh = self.rounds.is_fresh(self.global_step)
        with self.activity.of("trainer").busy("train"), self._naming_samples():
            batch, sampled = self.stage("gen", self.sample if is_fresh else self.batch_again)
            self.origins.trained_by = self.weight_version
            batch, scored = self.stage("score", self.score, batch)
            if is_fresh and self.rounds.train_epochs > 1:
                self._round.append(batch.select())
            batch, estimated = self.stage("adv", self.estimate, batch)
            updated = self.stage("update", self.update, batch)
            synced = self.stage("update_weights", self.sync)
        return sampled | scored | estimated | updated | synced | self.speed(batch)

    def sample(self) -> tuple[DataProto, Metrics]:
        """A batch of the queue."""
        self._draws = Draws()
        if self.rounds.batch_of(self.global_step) == 0:
            self._round = []
            self.origins.begin_round()
        batch, metrics = super().sample()
        metrics["detached/queue_depth"] = float(self.buffer.depth)
        return batch, metrics | over_draws(self._draws.metrics) | self._draw_metrics()

    def draw(self, attempt: int = 0) -> DataProto:
        """Take samples from the queue, and wait for makers where it has too few."""
        experiences = self.buffer.take(self._demand(attempt))
        experiences.sort(key=lambda one: (one.rank, one.number))
        batch = concat_rows([one.samples for one in experiences if one.samples is not None])

        self.origins.add(experiences)
        self._draws.uids += [uid for one in experiences for uid in one.uids]
        self._draws.metrics += [one.metrics for one in experiences]
        self._draws.num_tokens += int(count_ones(batch, "response_mask").sum())
        if plays(self.config):
            for maker, rows in self.origins.rows_by_maker(batch).items():
                self.rollouts.note_environments(batch[rows], maker_role(maker), "gen")
        self.call_hook("on_samples", batch)
        return batch

    def batch_again(self) -> tuple[DataProto, Metrics]:
        """A batch of this round that returns, with its scores."""
        self._draws = Draws()
        batch = self._round[self.rounds.batch_of(self.global_step)]
        return batch.select(), self._draw_metrics()

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Balance the ranks, unless `detached.edges` says which rows a rank gets."""
        if self.topology.routed_ranks == [ANY_RANK]:
            return super().balance(batch)
        return number_rows(batch, self.config), {}

    def policy_is_current(self, batch: DataProto) -> bool:
        """Within a round the policy moves away from the weights that it has published."""
        return self.rounds.length == 1 and super().policy_is_current(batch)

    def next_weights(self) -> Metrics:
        """Publish the weights for the makers, as a new version where a round has ended.

        The averaged weights of a validation, and the policy's own weights after it, keep the
        number of their version.
        """
        version = self.weight_version
        if not self.buffer.is_paused:
            if version and not self.rounds.ends_with(self.global_step):
                return {}
            version += 1
        with self.activity.of("trainer").syncing(f"weights of version {version}"):
            metrics = self.feed.publish(version)
        self.weight_version = version
        self.buffer.publish(version)
        return metrics

    def _demand(self, attempt: int) -> Demand:
        """The samples of one draw, and those that later steps will need."""
        step, rounds = self.global_step, self.rounds
        batch, place = rounds.num_fresh(step) - 1, rounds.place(step)[2]
        last_of_version = batch + rounds.update_steps - place
        sizes = self.buffer.stream.num_samples
        rest_of_run = None
        if not self.config.algorithm.filter_groups.enable:  # else nobody knows how many are needed
            total = rounds.num_fresh(self.total_steps)
            last_of_version = min(last_of_version, total)
            # makers may run ahead no further than this: the bound of staleness is lower there
            ahead = (self.config.detached.max_staleness + 1) * rounds.update_steps
            rest_of_run = sum(map(sizes, range(batch + 1, min(total, batch + 1 + ahead))))
        rest_of_version = sum(map(sizes, range(batch + 1, last_of_version)))
        return Demand(sizes(batch), attempt, rest_of_version, rest_of_run)

    def _draw_metrics(self) -> Metrics:
        metrics = {"detached/drawn_tokens": float(self._draws.num_tokens)}
        if self.rounds.train_epochs > 1:
            metrics["detached/reused"] = float(self.rounds.place(self.global_step)[1])
            metrics["detached/batch_of_round"] = float(self.rounds.batch_of(self.global_step))
        return metrics

    @contextmanager
    def _naming_samples(self) -> Iterator[None]:
        """Within, an error gets a note with the uids of the step's samples."""
        try:
            yield
        except Exception as error:
            uids, step = self._draws.uids, self.global_step
            known = f"is on the samples of uid {few(uids)}" if uids else "has no samples yet"
            error.add_note(f"step {step} {known}")
            raise

    # ------------------------------------------------------------------------- the makers

    def start_makers(self) -> None:
        """Start the makers' threads, the first time."""
        if not self._have_started:
            self._have_started = True
            for maker in self.makers:
                maker.start()

    def call(
        self, role: str, method: str, batch: DataProto, *more: DataProto, **settings: Any
    ) -> Any:
        """With `detached.score_on=maker` the reward models of a validating maker answer."""
        if role in self.config.score_roles:
            role = role_on(role, self.validators[0])
        return super().call(role, method, batch, *more, **settings)

    def check_trainers(self) -> None:
        """Ping every process that trains: a loss would stay unnoticed while makers are awaited."""
        pools = expand_roles(self.config.role_mapping)
        roles = {pools[role]: role for role in self.groups if role not in self.maker_roles}
        gather(*(self.groups[role].ping.remote() for role in roles.values()))

    def is_ending(self) -> bool:
        """Return whether the run ends: then nobody waits for a lost maker."""
        return bool(self.run.stop.received) or self.buffer.is_closed

    # ------------------------------------------------------------------------- validation

    @property
    def validators(self) -> list[int]:
        """The makers that validate: those with the settings of the first maker that lives.

        With `detached.score_on=maker` that first maker also scores.
        """
        makers = self.buffer.makers or [0]
        first = self.config.rollout_of(makers[0])
        return [maker for maker in makers if self.config.rollout_of(maker) == first]

    def validation_samples(self, prompts: DataProto) -> DataProto:
        """The samples of these rows; each validating maker generates an equal number."""
        return self.buffer.validate(prompts, self.validators)

    def validation_metrics(self) -> Metrics:
        """Validate while makers generate nothing else."""
        self.start_makers()
        with self.buffer.paused(PAUSE_S):
            self._validation_began = time.time()
            return super().validation_metrics()

    # ----------------------------------------------------------------- what observers ask

    @property
    def makers_log(self) -> SampleLog:
        """The log in which makers begin their samples."""
        return self.buffer.log

    def stage_of(self, call: Call, ended_in: str) -> str:
        """Calls of makers belong to `gen`, whatever the trainer does, except for a validation."""
        if call["method"] not in MADE_BY_MAKERS or call["role"] not in self.maker_roles:
            return ended_in
        is_validation = ended_in == "testing" and call["start"] >= self._validation_began
        return ended_in if is_validation else "gen"

    def facts_of_samples(self, batch: DataProto) -> dict[SampleKey, dict[str, int]]:
        """For the sample log: who trains on each sample, and how old it is."""
        return self.origins.facts(batch)

    def sample_fields(self, batch: DataProto) -> dict[str, list[Any]]:
        """Further fields of `rollouts/N.jsonl`: maker, trainer rank, version."""
        return self.origins.fields(batch)

    def speed(self, batch: DataProto) -> Metrics:
        """PPO's, the age of the samples, and the seconds of makers and trainers by state."""
        return super().speed(batch) | self.activity.metrics() | self.origins.metrics(batch)

    def on_step_end(self, metrics: Metrics) -> None:
        """Check that the log and the queue agree about every sample."""
        self.buffer.check()

    # ------------------------------------------------------------- what the loop asks for

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, including those on batches that return."""
        epochs = self.config.detached.train_epochs
        if self.config.data.total_prompts is not None:
            return self.loader.total_steps * epochs
        return self.config.trainer.num_steps(lambda n: n * len(self.loader) * epochs)

    @property
    def can_save(self) -> bool:
        """Return whether the step ends a round, whose batches no checkpoint holds."""
        return self.rounds.ends_with(self.global_step)

    def replaceable_roles(self) -> frozenset[str]:
        """None: `detached.on_maker_loss` says what happens when a maker is lost."""
        return frozenset()

    def saved_groups(self) -> dict[str, Any]:
        """All groups but the makers', which may come and go during a run."""
        return {role: self.groups[role] for role in self.groups if role not in self.maker_roles}

    def state_dict(self) -> dict[str, Any]:
        """PPO's state, the sample log, and the place in the prompts."""
        return super().state_dict() | {"detached": self.buffer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; samples that were being generated are generated again."""
        super().load_state_dict(state)
        start = self.run.checkpoints.start
        restores = self.config.detached.on_resume == "restore"
        folder = start / SAMPLES if restores and start is not None else None
        self.buffer.load_state_dict(state["detached"], folder)

    def write_more(self, folder: Path) -> None:
        """Write the queued samples, if `detached.on_resume=restore`."""
        if self.config.detached.on_resume == "restore":
            self.buffer.write_samples(folder / SAMPLES)

    def close(self) -> None:
        """Stop the makers; check, print and write the log."""
        self.buffer.close()
        until = time.monotonic() + END_S
        for maker in self.makers:
            maker.wait_for_end(max(until - time.monotonic(), 0.0))
        self.buffer.check()
        log = self.makers_log.state_dict()
        print(log_in_words(log), flush=True)
        facts = {"ledger": log, "activity": self.activity.seconds()}
        write_whole(self.run.folder / "detached.json", json.dumps(facts))

    @classmethod
    def prepare(cls, config: PPOConfig, at_end: ExitStack) -> tuple[Any, ...]:
        """Check the start and every maker's engine, then do what PPO does."""
        assert isinstance(config, DetachedConfig), "this trainer's configuration"
        check_start(config)
        for maker, role in enumerate(config.topology.roles()):
            config_of_maker = config.of_role(role)
            try:
                check_rollout(config_of_maker, role)
            except ConfigError as error:
                if config_of_maker is config:
                    raise
                raise ConfigError(f"{MAKER_SETTINGS}.{maker}: {error}") from error
        return super().prepare(config, at_end)

    @classmethod
    def describe(
        cls, config: PPOConfig, max_columns: int | None = None, brief: bool = False
    ) -> list[str]:
        """Describe the work of makers and trainers, then add PPO's paragraphs."""
        assert isinstance(config, DetachedConfig), "this trainer's configuration"
        plan = "\n".join(plan_lines(config, max_columns, brief))
        return [plan, *super().describe(config, max_columns, brief)]
