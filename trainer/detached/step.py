"""`DetachedTrainer`: PPO's step on samples that makers make meanwhile.

The dataflow is `trainer.ppo.step.PPOTrainer.step`, unchanged. What differs is said here: where
samples come from (`trainer.detached.source`), and that weights are published, not sent: each maker
takes them when it can.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from trainer.detached.activity import Activity
from trainer.detached.buffer import EndOfSamples, ExperienceBuffer, ToldToStop
from trainer.detached.checks import check_start
from trainer.detached.config import MAKER_SETTINGS, DetachedConfig, open_samples, samples_per_batch
from trainer.detached.ledger import Ledger
from trainer.detached.maker import (
    Maker,
    MakerCalls,
    MakerLosses,
    at_once,
    generate_in_parts,
    replace_lost,
    validators_of,
)
from trainer.detached.pieces import BufferSettings, Pacing, PieceStream
from trainer.detached.plan import plan_lines
from trainer.detached.roles import maker_roles, score_roles
from trainer.detached.samplers import SAMPLERS
from trainer.detached.scoring import MADE_BY_MAKERS, REWARD_METHOD, ScoresHere, score_samples
from trainer.detached.source import DetachedSource, Rounds
from trainer.detached.topology import ANY_RANK, maker_role, role_on
from trainer.detached.watch import TrainerWatch
from trainer.detached.weights import WeightFeed
from trainer.loop import Metrics
from trainer.ppo.config import PPOConfig
from trainer.ppo.sample import number_rows
from trainer.ppo.step import PPOTrainer
from trainer.rollouts.preflight import check_rollout
from trainer.run_folder.timeline import Timeline
from trainer.run_folder.tracking import Tracking
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, WorkerDiedError
from verl_like.files import write_whole
from workers.columns import has_column, read_columns, rm_column

SAMPLES = "queued_samples"
"""The folder of a checkpoint that holds what was queued."""


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
        self.topology = config.topology
        self.activity, self.ledger = Activity(), Ledger()
        self.rounds = Rounds(detached.update_steps, detached.train_epochs, config.trainer.seed)
        self._roles_of_makers = maker_roles(config)
        self.feed = WeightFeed(config, self.groups, self.topology)

        samples = config.actor_rollout_ref.rollout.n
        stream = PieceStream(
            self.loader,
            config.piece_size,
            samples,
            self.topology.routed_ranks,
            self.topology.makers_of,
        )

        limit = open_samples(config) if detached.limit is None else detached.limit
        settings = BufferSettings(
            limit=limit,
            evicts=detached.when_full == "evict_oldest",
            seed=config.trainer.seed,
            window=detached.window,
            stall_s=detached.stall_s,
        )
        per_version = detached.update_steps * samples_per_batch(config)
        pacing = Pacing(detached.max_staleness, per_version)
        sampler = SAMPLERS.look_up(detached.sampler)()
        buffer = ExperienceBuffer(stream, pacing, sampler, settings, self.ledger, self.activity)

        trainers = [role for role in self.groups if role not in self._roles_of_makers]
        self.watch = TrainerWatch([self.groups[role] for role in trainers], buffer)
        self.maker_losses = MakerLosses(
            config,
            self.groups,
            self.topology,
            self.init_arguments,
            lambda: bool(self.stop.received) or buffer.is_closed,
        )

        makers = [
            Maker(
                number,
                buffer,
                self.activity,
                self.calls_of(number),
                max_tokens=config.rollout_of(number).max_new_tokens_per_call,
                weights_at_once=detached.new_weights == "at_once",
                keeps_samples=detached.on_maker_loss != "fail",
            )
            for number in range(self.topology.makers)
        ]
        return DetachedSource(buffer, makers, self.rounds, self.make_samples)

    def calls_of(self, maker: int) -> MakerCalls:
        """What a maker's thread asks for."""
        role = maker_role(maker)
        own_roles = {kind: role_on(kind, maker) for kind in score_roles(self.config)}

        def asked(rows: DataProto, attempt: int) -> DataProto:
            needed = self.needed(rows, role, "generate_sequences")
            needed.meta_info = needed.meta_info | {"attempt": attempt}
            return needed

        return MakerCalls(
            group=lambda: self.groups[role],
            asked=asked,
            take_weights=lambda: self.feed.deliver(maker),
            on_loss=partial(self.maker_losses, maker),
            score=partial(score_samples, self.groups, own_roles) if own_roles else None,
        )

    # ------------------------------------------------------------------ what is different from PPO

    @property
    def validators(self) -> list[Maker]:
        """The makers that validate; the first of them scores, where makers do."""
        return validators_of(self.source.makers, self.config)

    def ask_rollout(self, asked: DataProto) -> DataProto:
        """Of a validation's samples each maker that validates makes a part."""
        return generate_in_parts(self.groups, self.validators, asked)

    def call(
        self, role: str, method: str, batch: DataProto, *more: DataProto, **settings: Any
    ) -> Any:
        """A reward model is not asked again about what a maker has had it score.

        Of makers' roles, those of the first maker that validates answer.
        """
        if method == REWARD_METHOD and has_column(batch, rm_column(role)):
            return ScoresHere(batch, role)
        if self._roles_of_makers.get(role) == 0:
            role = role_on(role, self.validators[0].number)
        return super().call(role, method, batch, *more, **settings)

    @property
    def can_save(self) -> bool:
        """Not within a round, whose batches no checkpoint holds."""
        return self.rounds.ends_with(self.global_step)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those on batches that come again included."""
        if self.config.data.total_prompts is None and self.config.trainer.total_training_steps:
            return self.config.trainer.total_training_steps
        return self.loader.total_steps * self.config.detached.train_epochs

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

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """As PPO does; but rows that go to one rank by `detached.edges` stay there."""
        if self.topology.routed_ranks == [ANY_RANK]:
            return super().balance(batch)
        return number_rows(batch, self.config), {}

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """What a batch that comes again has already is not made anew."""
        batch, metrics = super().score(batch)
        self.source.keep(batch)
        return batch, metrics

    def update(self, batch: DataProto) -> Metrics:
        """PPO's update; then the ledger says what was trained on."""
        self._trained_by = self.weight_version
        metrics = super().update(batch)
        if self.rounds.place(self.global_step)[1] == 0:
            self.source.buffer.trained(self._ranks_and_versions(batch))
        return metrics

    def sync(self) -> Metrics:
        """The weights are published as a new version, if a round has ended; makers take them."""
        if self.source.buffer.is_paused:  # a validation by other weights, or the end of one
            metrics = self.feed.publish(self.weight_version)
            at_once(lambda maker: self.feed.deliver(maker.number), self.validators)
            return metrics
        if self.weight_version and not self.rounds.ends_with(self.global_step):
            return {}
        self.weight_version += 1
        with self.activity.of("trainer").syncing(f"weights of version {self.weight_version}"):
            metrics = self.feed.publish(self.weight_version)
        self.source.buffer.publish(self.weight_version)
        return metrics

    @property
    def keeps_ledger(self) -> bool:
        """Not beside the ledger of makers, which has every sample."""
        return False

    def policy_is_current(self, batch: DataProto) -> bool:
        """Not within a round: the policy has moved since its weights were published."""
        return self.rounds.length == 1 and super().policy_is_current(batch)

    def validation_metrics(self) -> Metrics:
        """Makers rest meanwhile, and those that validate have the newest weights.

        If one of them loses a process, it is looked after, and the validation begins anew.
        """
        with self.source.paused():
            self._makers_rest_since = time.time()
            while True:
                makers = self.validators
                try:
                    at_once(Maker.take_weights, makers)
                    return super().validation_metrics()
                except WorkerDiedError as error:
                    replace_lost(makers, self.maker_losses, error)

    def stage_of(self, call: Mapping[str, Any], ended_in: str) -> str:
        """Makers make samples whatever trainers do; while they rest, it is for a validation."""
        if call["method"] not in MADE_BY_MAKERS or call["role"] not in self._roles_of_makers:
            return ended_in
        is_validation = ended_in == "testing" and call["start"] >= self._makers_rest_since
        return ended_in if is_validation else "gen"

    @classmethod
    def recipe_class(cls) -> type[PPOTrainer]:
        """This one."""
        return DetachedTrainer

    @classmethod
    def describe(cls, config: PPOConfig, max_columns: int | None = None) -> list[str]:
        """What makers and trainers will do, then PPO's paragraphs."""
        assert isinstance(config, DetachedConfig), "this trainer's configuration"
        plan = "\n".join(plan_lines(config, max_columns))
        return [plan, *super().describe(config, max_columns)]

    def state_dict(self) -> dict[str, Any]:
        """PPO's, the ledger, and the place in the prompts."""
        return super().state_dict() | {"detached": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with them; what was open is made again."""
        super().load_state_dict(state)
        start = self.checkpoints.start
        folder = None
        if self.config.detached.on_resume == "restore" and start is not None:
            folder = start / SAMPLES
        self.source.load_state_dict(state["detached"], folder)

    def write_more(self, folder: Path) -> None:
        """The samples that are queued, if a resume shall find them."""
        if self.config.detached.on_resume == "restore":
            self.source.write_samples(folder / SAMPLES)

    def replaceable_roles(self) -> frozenset[str]:
        """None: makers are looked after by `detached.on_maker_loss`, beside the steps."""
        return frozenset()

    def init_models(self) -> None:
        """As PPO does; from then on a trainer that is lost is noticed."""
        super().init_models()
        self.watch.start()

    def close(self) -> None:
        """End the makers, and check the ledger."""
        self.watch.stop()
        self.source.buffer.close()
        self.source.close()
        self.source.buffer.check()
        print(self.ledger.describe(), flush=True)
        facts = {"ledger": self.ledger.as_dict(), **self.activity.as_json()}
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

    def _ranks_and_versions(self, batch: DataProto) -> dict[str, list[tuple[int, int]]]:
        """Uid -> trainer rank and version of each of its samples."""
        versions = read_columns(batch, "policy_version")["policy_version"].tolist()
        size = -(-len(batch) // self.groups["actor"].world_size)
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for row, (uid, version) in enumerate(
            zip(batch.non_tensor_batch["uid"], versions, strict=True)
        ):
            found[str(uid)].append((row // size, version))
        return found

    def batch_metrics(self, batch: DataProto) -> Metrics:
        """PPO's, how old the samples were, and what makers and trainers did since the last step."""
        versions = read_columns(batch, "policy_version")["policy_version"]
        ages = self._trained_by - versions
        return {
            **super().batch_metrics(batch),
            **self.activity.metrics(),
            "detached/staleness/mean": float(ages.float().mean()),
            "detached/staleness/max": float(ages.max()),
            **self._value_ages(batch),
            **{
                f"detached/staleness/{age}": float(count)
                for age, count in zip(
                    *(of.tolist() for of in ages.unique(return_counts=True)), strict=True
                )
            },
        }

    def _value_ages(self, batch: DataProto) -> Metrics:
        """Versions between the values of makers' critics and the update."""
        if not has_column(batch, "value_version"):
            return {}
        ages = self._trained_by - read_columns(batch, "value_version")["value_version"]
        return {"detached/value_staleness/max": float(ages.max())}
