"""`DetachedTrainer`: PPO's step on samples that makers make meanwhile.

The dataflow is `trainer.ppo.step.PPOTrainer.step`, unchanged. What differs is said here: where
samples come from (`trainer.detached.source`), and that weights are published, not sent: each maker
takes them when it can.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer.detached.activity import Activity
from trainer.detached.buffer import EndOfSamples, ExperienceBuffer
from trainer.detached.checks import check_start
from trainer.detached.config import MAKER_SETTINGS, DetachedConfig
from trainer.detached.maker import (
    MADE_BY_MAKERS,
    REWARD_METHOD,
    Maker,
    MakerLosses,
    ScoresHere,
    ToldToStop,
)
from trainer.detached.plan import plan_lines
from trainer.detached.source import DetachedSource, Rounds
from trainer.detached.topology import ANY_RANK, maker_role, role_on
from trainer.detached.weights import WeightFeed
from trainer.loop import Metrics
from trainer.ppo.config import PPOConfig
from trainer.ppo.sample import FILTERED, Draw, Samples, number_rows
from trainer.ppo.step import PPOTrainer
from trainer.report.tokens import tokens_of
from trainer.rollouts.preflight import check_rollout
from trainer.run_folder.timeline import Timeline
from trainer.run_folder.tracking import Tracking
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.errors import ConfigError
from verl_like.files import write_whole
from verl_like.placement.roles import expand_roles
from workers.agents.loop import GIVEN_UP
from workers.columns import has_column, read_columns, rm_column
from workers.config import plays

SAMPLES = "queued_samples"
"""The folder of a checkpoint that holds what was queued."""
PAUSE_S = 600.0
"""How long a validation waits for what the makers are making."""


class DetachedTrainer(PPOTrainer):
    """Drives trainers through PPO steps while makers generate."""

    config: DetachedConfig
    source: DetachedSource
    _trained_by = 0
    """The version of the weights that the last update began with."""
    _makers_rest_since = 0.0
    """When the last validation began, as `time.time` has it."""

    # ------------------------------------------------------------------------------- what it adds

    @classmethod
    def prepare(cls, config: PPOConfig, at_end: ExitStack) -> tuple[Any, ...]:
        """As PPO does; the start, and every maker's engine on its pool, are looked at first."""
        assert isinstance(config, DetachedConfig), "this trainer's configuration"
        check_start(config)
        for maker, role in enumerate(config.topology.roles()):
            own = config.of_role(role)
            try:
                check_rollout(own, role)
            except ConfigError as error:
                if own is config:
                    raise
                raise ConfigError(f"{MAKER_SETTINGS}.{maker}: {error}") from error
        return super().prepare(config, at_end)

    def make_source(self) -> DetachedSource:
        """Makers' threads, the buffer, and the ledger."""
        config, detached = self.config, self.config.detached
        self.topology, self.activity = config.topology, Activity()
        self.maker_roles = frozenset(config.maker_roles)
        self.rounds = Rounds(detached.update_steps, detached.train_epochs, config.trainer.seed)
        self.feed = WeightFeed(config, self.groups, self.topology)
        self.buffer = ExperienceBuffer(config, self.loader, self.activity, self.check_trainers)
        self.losses = MakerLosses(
            config, self.groups, self.init_arguments, self.is_ending, lambda: self.buffer.version
        )
        makers = [Maker(number, self) for number in range(self.topology.makers)]
        return DetachedSource(self.buffer, makers, self.rounds, self.make_samples)

    def is_ending(self) -> bool:
        """Whether a maker that was lost is not waited for."""
        return bool(self.stop.received) or self.buffer.is_closed

    def check_trainers(self) -> None:
        """Ask every process that trains for an answer: nobody would miss it meanwhile."""
        pools = expand_roles(self.config.role_mapping)
        of_pool = {pools[role]: role for role in self.groups if role not in self.maker_roles}
        gather(*(self.groups[role].ping.remote() for role in of_pool.values()))

    # ------------------------------------------------------------------ what is different from PPO

    @property
    def validators(self) -> list[int]:
        """The makers that validate: those with the settings of the first one that lives.

        That one scores, where makers do.
        """
        makers = self.buffer.makers or [0]
        first = self.config.rollout_of(makers[0])
        return [maker for maker in makers if self.config.rollout_of(maker) == first]

    def ask_rollout(self, asked: DataProto) -> DataProto:
        """Of a validation's samples each maker that validates makes a part."""
        return self.buffer.validate(asked, self.validators)

    def call(
        self, role: str, method: str, batch: DataProto, *more: DataProto, **settings: Any
    ) -> Any:
        """A reward model is not asked again about what a maker has had it score."""
        if method == REWARD_METHOD and has_column(batch, rm_column(role)):
            return ScoresHere(batch, role)
        if role in self.config.score_roles:
            role = role_on(role, self.validators[0])
        return super().call(role, method, batch, *more, **settings)

    @property
    def can_save(self) -> bool:
        """Not within a round, whose batches no checkpoint holds."""
        return self.rounds.ends_with(self.global_step)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those on batches that come again included."""
        times = self.config.detached.train_epochs
        if self.config.data.total_prompts is not None:
            return self.loader.total_steps * times
        return self.config.trainer.num_steps(lambda epochs: epochs * len(self.loader) * times)

    def timed_step(self) -> Metrics:
        """PPO's step, on the samples that come next."""
        filters = self.config.algorithm.filter_groups.enable
        self.source.ask_for(self.global_step, None if filters else self.total_steps)
        try:
            with self.activity.of("trainer").busy("train"):
                return super().timed_step()
        except Exception as error:
            error.add_note(self.source.in_words())
            raise

    def make_samples(self, draw: Draw) -> Samples:
        """As PPO does, of what makers have made; their environments are in the timeline, too."""

        def noted(attempt: int) -> DataProto:
            drawn = draw(attempt)
            makers = [self.source.makers_of[str(uid)] for uid in drawn.non_tensor_batch["uid"]]
            for maker in sorted(set(makers)):
                own = drawn[[row for row, its in enumerate(makers) if its == maker]]
                self.note_environments(own, maker_role(maker), "gen")
            return drawn

        return super().make_samples(noted if plays(self.config) else draw)

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """As PPO does; but rows that go to one rank by `detached.edges` stay there."""
        if self.topology.routed_ranks == [ANY_RANK]:
            return super().balance(batch)
        return number_rows(batch, self.config), {}

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """What a batch that comes again has already is not made anew."""
        self._trained_by = self.weight_version
        batch, metrics = super().score(batch)
        self.source.keep(batch)
        return batch, metrics

    def update(self, batch: DataProto) -> Metrics:
        """PPO's update; then the ledger says what was trained on."""
        metrics = super().update(batch)
        if self.rounds.place(self.global_step)[1] == 0:
            trained, left_out = tokens_of([metrics])
            for reason in (FILTERED, GIVEN_UP):  # the buffer counts them itself
                left_out.pop(reason, None)
            self.buffer.trained(self._ranks_and_versions(batch), trained, left_out)
        return metrics

    def sync(self) -> Metrics:
        """The weights are published, which makers take: as a new version, if a round has ended.

        A validation's averaged weights, and those after it, are other ones of the same version.
        """
        if not self.buffer.is_paused:
            if self.weight_version and not self.rounds.ends_with(self.global_step):
                return {}
            self.weight_version += 1
        with self.activity.of("trainer").syncing(f"weights of version {self.weight_version}"):
            metrics = self.feed.publish(self.weight_version)
        self.buffer.publish(self.weight_version)
        return metrics

    @property
    def keeps_ledger(self) -> bool:
        """Not beside the ledger of makers, which has every sample."""
        return False

    def policy_is_current(self, batch: DataProto) -> bool:
        """Not within a round: the policy has moved since its weights were published."""
        return self.rounds.length == 1 and super().policy_is_current(batch)

    def validation_metrics(self) -> Metrics:
        """Makers make a validation's samples, and no others meanwhile."""
        self.source.start()
        with self.buffer.paused(PAUSE_S):
            self._makers_rest_since = time.time()
            return super().validation_metrics()

    def stage_of(self, call: Mapping[str, Any], ended_in: str) -> str:
        """Makers make samples whatever trainers do; while they rest, it is for a validation."""
        if call["method"] not in MADE_BY_MAKERS or call["role"] not in self.maker_roles:
            return ended_in
        is_validation = ended_in == "testing" and call["start"] >= self._makers_rest_since
        return ended_in if is_validation else "gen"

    @classmethod
    def recipe_class(cls) -> type[PPOTrainer]:
        return DetachedTrainer

    @classmethod
    def describe(
        cls, config: PPOConfig, max_columns: int | None = None, brief: bool = False
    ) -> list[str]:
        """What makers and trainers will do, then PPO's paragraphs."""
        assert isinstance(config, DetachedConfig), "this trainer's configuration"
        plan = "\n".join(plan_lines(config, max_columns, brief))
        return [plan, *super().describe(config, max_columns, brief)]

    def state_dict(self) -> dict[str, Any]:
        """PPO's, the ledger, and the place in the prompts."""
        return super().state_dict() | {"detached": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with them; what was open is made again."""
        super().load_state_dict(state)
        start = self.checkpoints.start
        restores = self.config.detached.on_resume == "restore"
        folder = start / SAMPLES if restores and start is not None else None
        self.source.load_state_dict(state["detached"], folder)

    def write_more(self, folder: Path) -> None:
        """The samples that are queued, if a resume shall find them."""
        if self.config.detached.on_resume == "restore":
            self.source.write_samples(folder / SAMPLES)

    def replaceable_roles(self) -> frozenset[str]:
        """None: makers are looked after by `detached.on_maker_loss`, beside the steps."""
        return frozenset()

    def saved_groups(self) -> dict[str, Any]:
        """Not makers': they may come and go meanwhile; a sample is the same from any of them."""
        return {role: self.groups[role] for role in self.groups if role not in self.maker_roles}

    def close(self) -> None:
        """End the makers, and check the ledger."""
        self.source.close()
        self.buffer.check()
        print(self.buffer.ledger.describe(), flush=True)
        facts = {"ledger": self.buffer.ledger.as_dict(), "activity": self.activity.seconds()}
        write_whole(self.folder / "detached.json", json.dumps(facts))

    def _next_step(self, tracking: Tracking, timeline: Timeline) -> str:
        try:
            return super()._next_step(tracking, timeline)
        except EndOfSamples as end:
            self.global_step -= 1
            self.save(is_last=True)
            self._commit()
            return f"the run ends after step {self.global_step}: {end}"
        except ToldToStop:
            self.global_step -= 1
            if self.can_save:
                self._stop_here()
            self.stop.end("while it waited for a node in the place of a maker's")
            raise

    def sample_fields(self, batch: DataProto) -> dict[str, list[Any]]:
        """Who made each sample, the trainer rank that learns from it, and its weights' version."""
        size = -(-len(batch) // self.groups["actor"].world_size)
        uids = map(str, batch.non_tensor_batch["uid"])
        return {
            "maker": [self.source.makers_of.get(uid) for uid in uids],
            "trainer": [row // size for row in range(len(batch))],
            "trained_by_version": [self._trained_by] * len(batch),
        }

    def _ranks_and_versions(self, batch: DataProto) -> dict[str, list[tuple[int, int]]]:
        """Uid -> trainer rank and version of each of its samples."""
        versions = read_columns(batch, "policy_version")["policy_version"].tolist()
        size = -(-len(batch) // self.groups["actor"].world_size)
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for row, uid in enumerate(batch.non_tensor_batch["uid"]):
            found[str(uid)].append((row // size, versions[row]))
        return found

    def batch_metrics(self, batch: DataProto) -> Metrics:
        """PPO's, how old the samples were, and what makers and trainers did since the last step."""
        versions = read_columns(batch, "policy_version")["policy_version"]
        ages = self._trained_by - versions
        metrics = super().batch_metrics(batch) | self.activity.metrics()
        for age, count in Counter(ages.tolist()).items():
            metrics[f"detached/staleness/{age}"] = float(count)
        if has_column(batch, "value_version"):  # of makers' copies of the critic
            of_values = self._trained_by - read_columns(batch, "value_version")["value_version"]
            metrics["detached/value_staleness/max"] = float(of_values.max())
        return metrics | {
            "detached/staleness/mean": float(ages.float().mean()),
            "detached/staleness/max": float(ages.max()),
        }
