"""Asynchronous PPO: the same stages, with a queue of samples in front.

    generators ─> queue ─> score ─> advantages ─> { critic ‖ actor } ─> weights ─> generators

Each generator generates in its own thread (`generator`), and the trainer takes batches from the
bounded queue (`buffer`). New weights are published, and each generator takes them when it can
(`weights`). Read `AsyncTrainer.step` first.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer.async_training.activity import Activity
from trainer.async_training.buffer import ExperienceBuffer
from trainer.async_training.checks import check_engines, check_start
from trainer.async_training.config import AsyncConfig
from trainer.async_training.generator import MADE_BY_GENERATORS, Generator
from trainer.async_training.lost_generators import LostGenerators
from trainer.async_training.origins import Origins
from trainer.async_training.plan import plan_lines
from trainer.async_training.rounds import Rounds
from trainer.async_training.topology import ANY_RANK, generator_role, role_on
from trainer.async_training.weights import WeightFeed
from trainer.ppo.config import PPOConfig
from trainer.ppo.metrics import speed
from trainer.ppo.sample import number_rows
from trainer.ppo.stages import PPOTrainer
from trainer.record import Call, Metrics, Run
from trainer.report.async_training import describe_log
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.samples import concat_rows
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.files import write_whole
from verl_like.placement.roles import expand_roles
from workers.config import plays
from workers.rewards.weighted import Rewards

PAUSE_S = 600.0
"""How long a validation waits for generators to finish what they are generating."""
END_S = 10.0
"""How long the end of a run waits for generators; a failed run reports soon."""


class AsyncTrainer(PPOTrainer):
    """PPO's stages on samples that generators generate meanwhile."""

    config: AsyncConfig
    origins: Origins
    weights: WeightFeed

    def __init__(self, run: Run, tokenizer: Any, loader: Any, rewards: Rewards, *ptx: Any) -> None:
        """The generators' threads start with the first step or validation."""
        super().__init__(run, tokenizer, loader, rewards, *ptx)
        config = self.config
        self.activity, self.rounds = Activity(), Rounds.of(config)
        self.buffer = ExperienceBuffer(config, loader, self.activity, self.check_trainers)
        self.origins = Origins(config.topology.trainers, self.buffer.log)
        self.weights = WeightFeed(run, self.buffer, self.rounds, self.activity)
        self.rollouts = Rollouts(self, tokenizer, rewards, ask=self.validation_samples)
        self.losses = LostGenerators(run, self.buffer, self.init_arguments)
        self.generators = [
            Generator(number, self) for number in range(config.async_training.generators)
        ]
        self._round: list[DataProto] = []
        """The scored batches of this round, which later epochs train on again."""
        self._validation_began = 0.0
        """When generators last came to rest for a validation, by `time.time`."""

    # --------------------------------------------------------------------------- the step

    def step(self) -> Metrics:
        """One step: a batch of the queue, or one that returns in a later epoch of its round."""
        self.start_generators()
        with self.activity.of("trainer").busy("train"), self.origins.naming_samples(self.run):
            batch, sampled = self.stage("gen", self.sample)
            self.origins.trained_by = self.weights.version
            batch, scored = self.stage("score", self.score, batch)
            if self.rounds.train_epochs > 1 and self.rounds.is_fresh(self.global_step):
                self._round.append(batch.select())
            batch, estimated = self.stage("adv", self.estimate, batch)
            updated = self.stage("update", self.update, batch)
            synced = self.stage("update_weights", self.sync)
        aged = self.activity.metrics() | self.origins.metrics(batch)
        return sampled | scored | estimated | updated | synced | speed(self, batch) | aged

    def start_generators(self) -> None:
        """Start the generators' threads, the first time."""
        for generator in self.generators:
            generator.start()

    def sample(self) -> tuple[DataProto, Metrics]:
        """A batch of the queue, or one of this round that returns with its scores."""
        rounds, step = self.rounds, self.global_step
        place, epoch = rounds.batch_of(step), rounds.place(step)[1]
        metrics = {}
        if rounds.train_epochs > 1:
            metrics = {"async/reused": float(epoch), "async/batch_of_round": float(place)}
        self.origins.begin_step(begins_round=place == epoch == 0)
        if epoch:
            batch = self._round[place].select()
            return batch, metrics | self.origins.draw_metrics()
        if place == 0:
            self._round = []
        batch, sampled = super().sample()
        metrics["async/queue_depth"] = float(self.buffer.depth)
        return batch, sampled | self.origins.draw_metrics() | metrics

    def draw(self, attempt: int = 0) -> DataProto:
        """Take samples from the queue, and wait for generators where it has too few."""
        samples_of = self.buffer.stream.num_samples
        demand = self.rounds.demand(self.global_step, self.total_steps, samples_of, attempt)
        experiences = self.buffer.take(demand)
        experiences.sort(key=lambda piece: (piece.rank, piece.number))
        batch = concat_rows([piece.samples for piece in experiences if piece.samples is not None])
        self.origins.add(experiences, batch)
        if plays(self.config):
            for generator, rows in self.origins.rows_by_generator(batch).items():
                self.rollouts.note_environments(batch[rows], generator_role(generator), "gen")
        self.call_hook("on_samples", batch)
        return batch

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Balance the ranks, unless `async_training.sample_routes` says which rows a rank gets."""
        if self.config.topology.routed_ranks == [ANY_RANK]:
            return super().balance(batch)
        return number_rows(batch, self.config), {}

    def call(
        self, role: str, method: str, batch: DataProto, *more: DataProto, **settings: Any
    ) -> Any:
        """With `async_training.score_on=generator` the reward models of a validating generator
        answer.
        """
        if role in self.config.score_roles:
            role = role_on(role, self.config.validators(self.buffer.generators)[0])
        return super().call(role, method, batch, *more, **settings)

    def check_trainers(self) -> None:
        """Ping every process that trains: nobody else would notice a lost one meanwhile."""
        pools = expand_roles(self.config.role_mapping)
        roles = {pools[role]: role for role in self.saved_groups()}
        gather(*(self.groups[role].ping.remote() for role in roles.values()))

    # ------------------------------------------------------------------------- validation

    def validation_samples(self, prompts: DataProto) -> DataProto:
        """The samples of these rows; each validating generator generates an equal number."""
        return self.buffer.validate(prompts, self.config.validators(self.buffer.generators))

    def validation_metrics(self) -> Metrics:
        """Validate while generators generate nothing else."""
        self.start_generators()
        with self.buffer.paused(PAUSE_S):
            self._validation_began = time.time()
            return super().validation_metrics()

    # -------------------------------------------- what the loop and the observers ask for

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, including those on batches that return."""
        epochs = self.config.async_training.train_epochs
        if self.config.data.total_prompts is not None:
            return self.loader.total_steps * epochs
        return self.config.trainer.num_steps(lambda n: n * len(self.loader) * epochs)

    @property
    def can_save(self) -> bool:
        """Return whether the step ends a round, whose batches no checkpoint holds."""
        return self.rounds.ends_with(self.global_step)

    def replaceable_roles(self) -> frozenset[str]:
        """None: `async_training.on_generator_loss` says what happens when a generator is lost."""
        return frozenset()

    def saved_groups(self) -> dict[str, Any]:
        """All groups but the generators', which may come and go during a run."""
        generators = self.config.generator_roles
        return {role: self.groups[role] for role in self.groups if role not in generators}

    def stage_of(self, call: Call, ended_in: str) -> str:
        """Generators' calls belong to `gen`, whatever the trainer does, except in a validation."""
        if (
            call["method"] not in MADE_BY_GENERATORS
            or call["role"] not in self.config.generator_roles
        ):
            return ended_in
        is_validation = ended_in == "testing" and call["start"] >= self._validation_began
        return ended_in if is_validation else "gen"

    def on_step_end(self, metrics: Metrics) -> None:
        """Check that the log and the queue agree about every sample."""
        self.buffer.check()

    def state_dict(self) -> dict[str, Any]:
        """PPO's state, the sample log, and the place in the prompts."""
        return super().state_dict() | {"async": self.buffer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; samples that were being generated are generated again."""
        super().load_state_dict(state)
        self.buffer.load_state_dict(state["async"], self.run.checkpoints.resume.start)

    def write_more(self, folder: Path) -> None:
        """Write the queued samples, if `async_training.on_resume=restore`."""
        self.buffer.write_samples(folder)

    def close(self) -> None:
        """Stop the generators; check, print and write the log."""
        self.buffer.close()
        until = time.monotonic() + END_S
        for generator in self.generators:
            generator.wait_for_end(max(until - time.monotonic(), 0.0))
        self.buffer.check()
        log = self.buffer.log.state_dict()
        print(describe_log(log), flush=True)
        facts = {"ledger": log, "activity": self.activity.seconds()}
        write_whole(self.run.folder / "async.json", json.dumps(facts))

    @classmethod
    def describe(
        cls, config: PPOConfig, max_columns: int | None = None, brief: bool = False
    ) -> list[str]:
        """Describe the work of generators and trainers, then add PPO's paragraphs."""
        assert isinstance(config, AsyncConfig), "this trainer's configuration"
        plan = "\n".join(plan_lines(config, max_columns, brief))
        return [plan, *super().describe(config, max_columns, brief)]

    @classmethod
    def prepare(cls, config: PPOConfig, at_end: ExitStack) -> tuple[Any, ...]:
        """Check the start and every generator's engine, then do what PPO does."""
        assert isinstance(config, AsyncConfig), "this trainer's configuration"
        check_start(config)
        check_engines(config)
        return PPOTrainer.prepare(config, at_end)
