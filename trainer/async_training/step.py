"""Asynchronous PPO: the same stages, with a queue of samples in front.

    generators ─> queue ─> score ─> advantages ─> { critic ‖ actor } ─> weights ─> generators

`AsyncTrainer.step` is the trainer's side. `trainer.async_training.generators` has the rest: the
generators' threads, the bounded queue, the delivery of weights to generators, and the recovery from
lost generators.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from trainer.async_training.checks import check_engines, check_start, plan_lines
from trainer.async_training.config import AsyncConfig
from trainer.async_training.generators import MADE_BY_GENERATORS, Generators
from trainer.async_training.origins import GENERATOR, Origins
from trainer.async_training.topology import ANY_RANK, generator_role
from trainer.ppo.metrics import speed
from trainer.ppo.preparation import PPO_RUN
from trainer.ppo.sampling import number_rows
from trainer.ppo.stages import PPOTrainer
from trainer.rollouts.rollouts import Rollouts
from trainer.run_state import Call, Metrics, Run
from verl_like.batch.protocol import DataProto
from workers.config import has_environment
from workers.rewards.weighted import Rewards


def prepare(config: AsyncConfig, at_end: ExitStack) -> tuple[Any, ...]:
    """Check the step to start from and each generator's engine, then prepare as PPO does."""
    check_start(config)
    check_engines(config)
    return PPO_RUN.prepare(config, at_end)


def describe(config: AsyncConfig, trainer_cls: type, brief: bool = False) -> list[str]:
    """Return PPO's description, then describe the work of generators and trainers."""
    plan = "\n".join(plan_lines(config, brief))
    return [*PPO_RUN.describe(config, trainer_cls, brief), plan]


class AsyncTrainer(PPOTrainer):
    """Runs PPO's stages on samples while generators generate the next ones."""

    recipe = replace(PPO_RUN, prepare=prepare, describe=describe)
    config: AsyncConfig
    origins: Origins

    def __init__(self, run: Run, tokenizer: Any, loader: Any, rewards: Rewards, *ptx: Any) -> None:
        """The generators' threads start at the first step or validation."""
        super().__init__(run, tokenizer, loader, rewards, *ptx)
        self.generators = generators = Generators(self)
        run.add_observer(generators)
        self.buffer, self.weights = generators.buffer, generators.weights
        self.origins, self.rounds = generators.origins, generators.rounds
        self.rollouts = Rollouts(
            self, tokenizer, rewards, ask=generators.validate, model_role=generators.model_role
        )
        self._round: list[DataProto] = []
        """The scored batches of this round, which later epochs train on again."""

    def step(self) -> Metrics:
        """Run PPO's stages on a batch from the queue, or on a batch that the round repeats."""
        self.generators.start()
        trainer = self.generators.activity.of("trainer")
        with trainer.busy("train"), self.origins.naming_samples(self.run):
            batch, sampled = self.stage("sample", self.next_batch)
            version = self.weights.version
            batch, scored = self.stage("score", self.score, batch)
            if self.rounds.train_epochs > 1 and self.rounds.is_fresh(self.global_step):
                self._round.append(batch.select())
            batch, estimated = self.stage("estimate", self.estimate, batch)
            updated = self.stage("update", self.update, batch)
            synced = self.stage("sync", self.sync)
        aged = self.generators.activity.metrics() | self.origins.ages(batch, version)
        return sampled | scored | estimated | updated | synced | speed(self, batch) | aged

    def next_batch(self) -> tuple[DataProto, Metrics]:
        """Return a fresh batch from the queue, or an earlier, scored batch of this round."""
        rounds, step = self.rounds, self.global_step
        place, epoch = rounds.batch_of(step), rounds.place(step)[1]
        metrics = {}
        if rounds.train_epochs > 1:
            metrics = {"async/train_epoch": float(epoch), "async/batch_index": float(place)}
        self.origins.begin_step()
        if epoch:
            return self._round[place].select(), metrics | self.origins.sampling_metrics()
        if place == 0:
            self._round = []
        batch, sampled = self.sample()
        metrics["async/queue_depth"] = float(self.buffer.depth)
        return batch, sampled | self.origins.sampling_metrics() | metrics

    def sample_prompts(self, attempt: int = 0) -> DataProto:
        """Take samples from the queue, and wait for generators if it has too few."""
        samples_of = self.buffer.chunks.num_samples
        demand = self.rounds.demand(self.global_step, self.total_steps, samples_of, attempt)
        batch = self.origins.batch_of(self.buffer.take_batch(demand))
        if has_environment(self.config):
            generators = batch.non_tensor_batch[GENERATOR]
            for generator in np.unique(generators).tolist():
                rows = batch[generators == generator]
                self.rollouts.note_environments(rows, generator_role(generator), "sample")
        self.call_hook("on_generated", batch)
        return batch

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Balance the ranks, unless routes of samples determine which rows each rank gets."""
        if self.config.topology.routed_ranks == [ANY_RANK]:
            return super().balance(batch)
        return number_rows(batch, self.config), {}

    def validation_metrics(self) -> Metrics:
        """Validate while generators generate nothing else."""
        with self.generators.paused():
            return super().validation_metrics()

    # -------------------------------------------------------------- methods that the loop calls

    @property
    def can_save(self) -> bool:
        """Return whether the step ends a round: checkpoints do not store a round's batches."""
        return self.rounds.ends_with(self.global_step)

    def replaceable_roles(self) -> frozenset[str]:
        """Return no roles: `async_training.on_generator_failure` handles lost generators."""
        return frozenset()

    def saved_groups(self) -> dict[str, Any]:
        """Return all groups except the generators', which a run may lose and restart."""
        return self.generators.others()

    def stage_of(self, call: Call, ended_in: str) -> str:
        """Return `sample` for generators' calls outside a validation, `ended_in` for all others."""
        roles = self.config.generator_roles
        if call["method"] not in MADE_BY_GENERATORS or call["role"] not in roles:
            return ended_in
        is_validation = call["start"] >= self.generators.validation_began
        return "testing" if ended_in == "testing" and is_validation else "sample"
