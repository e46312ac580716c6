"""The PPO dataflow, on one screen. Read `PPOTrainer.step` first.

    prompts ─> rollout ─> { old log-probs ‖ reference ‖ teacher ‖ values ‖ rewards }
            ─> KL, advantages ─> { critic ‖ actor } ─> weight sync ─> next prompts

Every `‖` joins futures: roles on different pools run at the same time, roles on one pool take
turns. Which is the case is a matter of configuration, and this file does not know it. The loop
around a step is `trainer.loop.Trainer`, what a run has beside its step is `trainer.ppo.run.PPORun`;
`trainer.ppo.dataflow` prints the graph of a configuration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

from trainer.loop import Metrics
from trainer.ppo.balance import balance_ranks
from trainer.ppo.compute_advantage import (
    columns_read,
    compares_with_greedy,
    compute_advantage,
    settings_of,
)
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe, old_log_probs_are_the_updates_own, own_stages
from trainer.ppo.distillation import distill
from trainer.ppo.dynamic_sampling import collect_groups
from trainer.ppo.memory import plan_text
from trainer.ppo.mismatch import measures_reference, mismatch_metrics, reference_drift
from trainer.ppo.rewards import apply_kl_penalty, clamp_scores
from trainer.ppo.roles import Scoring, scorings_of
from trainer.ppo.run import PPORun
from trainer.ppo.sample_source import Draw
from trainer.ppo.sizes import batch_table
from trainer.ppo.sync import averaged_weights, update_reference
from trainer.ppo.update_samples import FILTERED, fates_of, rows_per_update, samples_of_update
from trainer.ppo.validation import name_metrics, sample_all
from trainer.rollouts.samples import repeat_prompts
from trainer.rollouts.trainer import join_results
from trainer.run_folder.metrics import reduce_metrics
from trainer.sample_ledger import MADE
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.calls.result import Result
from workers.columns import has_column, read_columns, write_columns
from workers.config.conditions import teacher_is_alone
from workers.weights.sync import sync_weights


class PPOTrainer(PPORun):
    """Drives the roles in `groups` through PPO steps.

    To change it, override a stage or a hook in a subclass, and name that by
    `trainer.cls=my_module.MyTrainer`. The stages are the methods that `step` calls; `trainer.hooks`
    lists the hooks, in their order.
    """

    def step(self) -> Metrics:
        """One PPO step: the dataflow of this module's first lines."""
        with self.clock("gen"):
            batch, sampled = self.source.take()
        with self.clock("score"):
            self.batches.keep("score", batch, self.global_step)
            batch, scored = self.score(batch)
        with self.clock("adv"):
            self.batches.keep("estimate", batch, self.global_step)
            batch, estimated = self.estimate(batch)
        with self.clock("update"):
            self.batches.keep("update", batch, self.global_step)
            self.spare_time.plan(partial(self.note_samples, batch))
            updated = self.update(batch)
        with self.clock("update_weights"):
            synced = self.sync() | update_reference(self.config, self.groups, self.global_step)
        noted = self.spare_time.result() | self.batch_metrics(batch)
        return noted | sampled | scored | estimated | updated | synced

    # ----------------------------------------------------------------------------------- the stages

    def make_samples(self, draw: Draw) -> tuple[DataProto, Metrics]:
        """The samples of one step; with `filter_groups`, of as many draws as they take."""
        self.call_hook("on_sample_begin")
        filtered = self.config.algorithm.filter_groups
        metrics: Metrics = {}
        if filtered.enable:
            batch, metrics = collect_groups(
                lambda attempt: self.with_rewards(draw(attempt)),
                self.config.data.train_batch_size,
                filtered,
            )
            num_left_out = metrics["dynamic_sampling/num_groups_drawn"] - self.num_prompts(batch)
            num_samples = self.config.actor_rollout_ref.rollout.n
            self.count_samples(lambda: {FILTERED: int(num_left_out) * num_samples})
        else:
            batch = draw(0)

        batch, balance_metrics = self.balance(batch)
        self.call_hook("on_sample_end", batch)
        return batch, metrics | balance_metrics

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """The samples in an order that gives the actor's ranks like numbers of tokens.

        Mini-batches stay the same samples: those of `actor.shuffle` go by numbers given before.
        """
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        batch = self.number_rows(batch)
        sizes = actor.ppo_mini_batch_size, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
        num_mini_batches = math.lcm(*(self.num_prompts(batch) // size for size in sizes))
        return balance_ranks(batch, self.groups["actor"].world_size, num_mini_batches)

    def number_rows(self, batch: DataProto) -> DataProto:
        """The samples with the numbers that `actor.shuffle` goes by."""
        if self.config.actor_rollout_ref.actor.shuffle:
            return write_columns(batch, sample_number=torch.arange(len(batch)))
        return batch

    def generate(self, prompts: DataProto, attempt: int = 0) -> DataProto:
        """`rollout.n` samples of every prompt, each with the version of the policy that made it.

        A sample is known by its uid and its index among that uid's samples; `attempt` counts the
        draws of one step.
        """
        num_samples = self.config.actor_rollout_ref.rollout.n
        batch = self.roll_out(repeat_prompts(prompts, num_samples), attempt=attempt)

        if compares_with_greedy(self.config.algorithm.adv_estimator):
            baselines = self.greedy_scores(prompts).repeat_interleave(num_samples)
            batch = batch.union(DataProto.from_dict({"reward_baselines": baselines}))
        self.count_samples(lambda: {MADE: len(batch)})
        return batch

    def greedy_scores(self, prompts: DataProto) -> torch.Tensor:
        """The score of every prompt's greedy answer: what ReMax compares its samples with."""
        first = DataProto.from_dict({"sample_index": torch.zeros(len(prompts), dtype=torch.int64)})
        answers = self.roll_out(prompts.select().union(first), do_sample=False)
        answers, _ = self.with_rewards(answers)
        limit = self.config.algorithm.score_clip
        if limit is not None:  # as the scores that are compared with them
            answers, _ = clamp_scores(answers, limit)
        return read_columns(answers, "token_level_scores")["token_level_scores"].sum(dim=-1)

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Readings of the samples, and how far trainer and rollout are apart in them."""
        batch, metrics = self.once_more_if_lost(self.read_samples, batch)
        if has_column(batch, "old_log_probs"):
            metrics |= mismatch_metrics(batch)
            metrics |= reference_drift(batch, self.config, self.global_step)
        return batch, metrics

    def read_samples(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Independent readings of the same samples: all launched, then joined.

        What the batch has already is not made again, nor are old log-probs that the update itself
        will find or takes from the rollout.
        """
        calls = [] if has_column(batch, "token_level_scores") else [self.launch_rewards(batch)]
        bypasses = self.config.algorithm.rollout_correction.bypass_mode
        if not (bypasses or has_column(batch, "old_log_probs") or self.policy_is_current(batch)):
            wanted = columns_read(self.config.algorithm.adv_estimator)
            squares = {"sum_pi_squared": True} if "sum_pi_squared" in wanted else {}
            calls.append(self.call("actor", "compute_log_prob", batch, **squares))
        for scoring in self.scorings:
            if scoring.role in self.groups and not has_column(batch, scoring.column):
                calls.append(self.call(scoring.role, scoring.method, batch))

        return join_results(batch, gather(*calls))

    @functools.cached_property
    def scorings(self) -> list[Scoring]:
        """What roles say of the samples."""
        return scorings_of(self.config)

    def estimate(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Scores to rewards (less the KL, if that is asked for) to advantages; or a teacher's."""
        algorithm = self.config.algorithm
        metrics: Metrics = {}
        if algorithm.score_clip is not None:
            batch, metrics = clamp_scores(batch, algorithm.score_clip)

        scores, score_metrics = self.running_norm.scores(batch)
        metrics |= score_metrics
        if algorithm.use_kl_in_reward:
            batch, kl_metrics = apply_kl_penalty(
                batch, self.kl_ctrl, algorithm.kl_penalty, scores, algorithm.kl_penalty_per
            )
            metrics |= kl_metrics
        else:
            write_columns(batch, token_level_rewards=scores)

        if not teacher_is_alone(self.config):
            batch = compute_advantage(batch, **settings_of(algorithm))
            batch, advantage_metrics = self.running_norm.advantages(batch)
            metrics |= advantage_metrics
        batch, distilled = distill(batch, self.config)
        return batch, metrics | distilled

    def update(self, batch: DataProto) -> Metrics:
        """Critic and actor learn at the same time, where their pools differ.

        What they learn from is not always the whole batch: `samples_of_update` says.
        """
        whole = batch
        batch, metrics = samples_of_update(whole, self.config, self.global_step, self.balance)
        self.count_samples(lambda: fates_of(whole, batch, self.config))
        calls = []
        if "critic" in self.groups:
            calls.append(self.call("critic", "update_critic", batch))
        if self.global_step > self.config.trainer.critic_warmup:
            on_policy = self.policy_is_current(batch) and not has_column(batch, "old_log_probs")
            steered = self.entropy_ctrl.state_dict() if self.entropy_ctrl else {}
            num_rows = rows_per_update(self.config, self.num_prompts(batch))
            ptx = [] if self.ptx is None else [self.ptx.take(num_rows)]
            settings = {"on_policy": on_policy, **steered}
            calls.append(self.call("actor", "update_actor", batch, *ptx, **settings))

        self.spare_time.use()
        for result in gather(*calls):
            metrics |= reduce_metrics(Result.of(result).metrics)
        if self.entropy_ctrl:
            metrics |= self.entropy_ctrl.update(metrics.get("actor/token_entropy", 0.0))
        return metrics

    def sync(self) -> Metrics:
        """The rollout gets the actor's weights as a new version, verified."""
        self.weight_version += 1
        return self.once_more_if_lost(self.send_weights)

    def send_weights(self) -> Metrics:
        """One sync, of the version that is said."""
        bucket_mb = self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
        return sync_weights(
            self.groups["actor"], self.groups["rollout"], self.weight_version, bucket_mb
        )

    # ---------------------------------------------------------------------- what the loop asks for

    @classmethod
    def describe(cls, config: PPOConfig, max_columns: int | None = None) -> list[str]:
        """Batch sizes, memory, and the graph of a step as this class runs it."""
        graph = describe(config, max_columns, own_stages(cls, cls.recipe_class()))
        return [batch_table(config, max_columns), plan_text(config, max_columns), graph]

    @classmethod
    def recipe_class(cls) -> type[PPOTrainer]:
        """The recipe's own trainer: what a subclass of it overrides is shown as its own."""
        return PPOTrainer

    def init_models(self) -> None:
        """Build every role's model; the rollout gets its weights before the first prompt."""
        super().init_models()
        self.sync()

    def validation_metrics(self) -> Metrics:
        """Metrics of the whole validation set; its samples go to the run folder."""
        prompts = self.loader.validation
        assert prompts is not None, "a validation is due only where there are val_files"
        policy = self.config.actor_rollout_ref
        settings = asdict(policy.rollout.val_kwargs)
        score = partial(self.with_rewards, normalize=False)
        with averaged_weights(policy.actor, self.groups["actor"], self.sync):
            samples = sample_all(prompts.in_order(), self.roll_out, score, **settings)
        self.write_samples("validation", samples)
        return name_metrics(samples)

    # ------------------------------------------------------------------ what the stages share

    def num_prompts(self, samples: DataProto) -> int:
        """Prompts of a step's samples: fewer in a last step of `data.total_prompts`."""
        return len(samples) // self.config.actor_rollout_ref.rollout.n

    def count_samples(self, became: Callable[[], dict[str, int]]) -> None:
        """For the ledger of a run with faults on purpose.

        Stages of the user's own make and drop what only they know: of theirs nothing is counted.
        """
        if self.config.chaos.has_faults and not own_stages(type(self), self.recipe_class()):
            self.chaos.samples.count(self.global_step, became())

    def policy_is_current(self, batch: DataProto) -> bool:
        """Whether the update's own forward pass is the old log-probs, so that no pass is needed.

        That is so if the update allows it, and every sample is of the policy as it is now.
        """
        if not old_log_probs_are_the_updates_own(self.config):
            return False
        if measures_reference(self.config, self.global_step):
            return False
        versions = read_columns(batch, "policy_version")["policy_version"]
        return bool((versions == self.weight_version).all())
