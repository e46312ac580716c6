"""PPO's stages on samples that makers generate meanwhile.

The stages are those of `trainer.ppo.stages.PPOTrainer`. Two of them have another other side here:
`draw` takes samples from a bounded queue that makers fill (`trainer.detached.source`), and the
weights are published, for each maker to take when it can (`trainer.detached.weights`).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer.detached.activity import Activity
from trainer.detached.buffer import ExperienceBuffer
from trainer.detached.checks import check_start
from trainer.detached.config import MAKER_SETTINGS, DetachedConfig
from trainer.detached.maker import MADE_BY_MAKERS, REWARD_METHOD, Maker, MakerLosses, ScoresHere
from trainer.detached.plan import plan_lines
from trainer.detached.source import DetachedSource, Rounds
from trainer.detached.topology import ANY_RANK, maker_role, role_on
from trainer.detached.weights import WeightFeed
from trainer.ppo.config import PPOConfig
from trainer.ppo.sample import number_rows
from trainer.ppo.stages import PPOTrainer
from trainer.record import Call, Metrics, Run
from trainer.report.detached import log_in_words
from trainer.roadside.sample_log import SampleKey, SampleLog
from trainer.rollouts.preflight import check_rollout
from trainer.rollouts.rollouts import Rollouts
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.errors import ConfigError
from verl_like.files import write_whole
from verl_like.placement.roles import expand_roles
from workers.columns import has_column, read_columns, rm_column
from workers.config import plays
from workers.rewards.weighted import Rewards

SAMPLES = "queued_samples"
"""The folder of a checkpoint that holds what was queued."""
PAUSE_S = 600.0
"""How long a validation waits for what the makers are making."""


class DetachedTrainer(PPOTrainer):
    """The stages of PPO in a run whose makers generate beside the training."""

    config: DetachedConfig

    def __init__(self, run: Run, *inputs: Any) -> None:
        """Makers' threads start with the first step or validation."""
        super().__init__(run, *inputs)
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
        self.source = DetachedSource(self.buffer, makers, self.rounds)
        self._trained_by = 0
        """The version of the weights that the last update began with."""
        self._makers_rest_since = 0.0
        """When the last validation began, as `time.time` has it."""

    def make_rollouts(self, tokenizer: Any, rewards: Rewards) -> Rollouts:
        """Makers generate a validation's samples; those of a step are drawn from the queue."""
        return Rollouts(self, tokenizer, rewards, ask=self.validation_samples)

    @property
    def makers_log(self) -> SampleLog:
        """The log in which makers begin their samples."""
        return self.buffer.log

    # ---------------------------------------------------------------------------- the stages

    def step(self) -> Metrics:
        """PPO's step, on the samples that come next."""
        filters = self.config.algorithm.filter_groups.enable
        self.source.begin(self.global_step, None if filters else self.total_steps)
        try:
            with self.activity.of("trainer").busy("train"):
                return super().step()
        except Exception as error:
            error.add_note(self.source.in_words())
            raise

    def sample(self) -> tuple[DataProto, Metrics]:
        """A batch from the queue or, in later epochs of a round, one that comes again."""
        again = self.source.batch_again()
        if again is not None:
            return again, self.source.metrics()
        batch, metrics = super().sample()
        return batch, metrics | self.source.metrics()

    def draw(self, attempt: int = 0) -> DataProto:
        """Samples that makers have made."""
        batch = self.source.draw(attempt)
        if plays(self.config):
            makers = [self.source.makers_of[str(uid)] for uid in batch.non_tensor_batch["uid"]]
            for maker in sorted(set(makers)):
                rows = [row for row, its in enumerate(makers) if its == maker]
                self.rollouts.note_environments(batch[rows], maker_role(maker), "gen")
        self.call_hook("on_samples", batch)
        return batch

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """As PPO does; but rows that go to one rank by `detached.edges` stay there."""
        if self.topology.routed_ranks == [ANY_RANK]:
            return super().balance(batch)
        return number_rows(batch, self.config), {}

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """PPO's readings; a batch that comes again has them already."""
        self._trained_by = self.weight_version
        batch, metrics = super().score(batch)
        self.source.keep(batch)
        return batch, metrics

    def call(
        self, role: str, method: str, batch: DataProto, *more: DataProto, **settings: Any
    ) -> Any:
        """A reward model is not asked again about samples that a maker has had it score."""
        if method == REWARD_METHOD and has_column(batch, rm_column(role)):
            return ScoresHere(batch, role)
        if role in self.config.score_roles:
            role = role_on(role, self.validators[0])
        return super().call(role, method, batch, *more, **settings)

    def policy_is_current(self, batch: DataProto) -> bool:
        """Not within a round: the policy has moved since its weights were published."""
        return self.rounds.length == 1 and super().policy_is_current(batch)

    def next_weights(self) -> Metrics:
        """Publish the weights, which makers take: as a new version, if a round has ended.

        A validation's averaged weights, and those after it, are other ones of the same version.
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

    # ---------------------------------------------------------------------------- validation

    @property
    def validators(self) -> list[int]:
        """The makers that validate: those with the settings of the first one that lives.

        That one scores, where makers do.
        """
        makers = self.buffer.makers or [0]
        first = self.config.rollout_of(makers[0])
        return [maker for maker in makers if self.config.rollout_of(maker) == first]

    def validation_samples(self, asked: DataProto) -> DataProto:
        """Each maker that validates makes a part of a validation's samples."""
        return self.buffer.validate(asked, self.validators)

    def validation_metrics(self) -> Metrics:
        """Makers make a validation's samples, and no others meanwhile."""
        self.source.start()
        with self.buffer.paused(PAUSE_S):
            self._makers_rest_since = time.time()
            return super().validation_metrics()

    # ------------------------------------------------------------------------ what observers ask

    def stage_of(self, call: Call, ended_in: str) -> str:
        """Makers make samples whatever trainers do; while they rest, it is for a validation."""
        if call["method"] not in MADE_BY_MAKERS or call["role"] not in self.maker_roles:
            return ended_in
        is_validation = ended_in == "testing" and call["start"] >= self._makers_rest_since
        return ended_in if is_validation else "gen"

    def facts_of_samples(self, batch: DataProto) -> dict[SampleKey, dict[str, int]]:
        """The trainer rank that learns from each sample, and the age of its weights."""
        versions = read_columns(batch, "policy_version")["policy_version"].tolist()
        names = zip(
            batch.non_tensor_batch["uid"], batch.padded("sample_index").tolist(), strict=True
        )
        size = -(-len(batch) // self.groups["actor"].world_size)
        return {
            (str(uid), index): {
                "trainers": row // size,
                "versions": version,
                "staleness": self._trained_by - version,
            }
            for row, ((uid, index), version) in enumerate(zip(names, versions, strict=True))
        }

    def sample_fields(self, batch: DataProto) -> dict[str, list[Any]]:
        """Who made each sample, the trainer rank that learns from it, and its weights' version."""
        size = -(-len(batch) // self.groups["actor"].world_size)
        uids = map(str, batch.non_tensor_batch["uid"])
        return {
            "maker": [self.source.makers_of.get(uid) for uid in uids],
            "trainer": [row // size for row in range(len(batch))],
            "trained_by_version": [self._trained_by] * len(batch),
        }

    def speed(self, batch: DataProto) -> Metrics:
        """PPO's, how old the samples were, and what makers and trainers did since the last step."""
        versions = read_columns(batch, "policy_version")["policy_version"]
        ages = self._trained_by - versions
        metrics = super().speed(batch) | self.activity.metrics()
        for age, count in Counter(ages.tolist()).items():
            metrics[f"detached/staleness/{age}"] = float(count)
        if has_column(batch, "value_version"):  # of makers' copies of the critic
            of_values = self._trained_by - read_columns(batch, "value_version")["value_version"]
            metrics["detached/value_staleness/max"] = float(of_values.max())
        return metrics | {
            "detached/staleness/mean": float(ages.float().mean()),
            "detached/staleness/max": float(ages.max()),
        }

    def on_step_end(self, metrics: Metrics) -> None:
        """The log has every sample where it is in fact."""
        self.buffer.check()

    # -------------------------------------------------------------------- what the loop asks for

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those on batches that come again included."""
        times = self.config.detached.train_epochs
        if self.config.data.total_prompts is not None:
            return self.loader.total_steps * times
        return self.config.trainer.num_steps(lambda epochs: epochs * len(self.loader) * times)

    @property
    def can_save(self) -> bool:
        """Not within a round, whose batches no checkpoint holds."""
        return self.rounds.ends_with(self.global_step)

    def is_ending(self) -> bool:
        """Whether a maker that was lost is not waited for."""
        return bool(self.run.stop.received) or self.buffer.is_closed

    def check_trainers(self) -> None:
        """Ask every process that trains for an answer: nobody would miss it meanwhile."""
        pools = expand_roles(self.config.role_mapping)
        of_pool = {pools[role]: role for role in self.groups if role not in self.maker_roles}
        gather(*(self.groups[role].ping.remote() for role in of_pool.values()))

    def replaceable_roles(self) -> frozenset[str]:
        """None: makers are looked after by `detached.on_maker_loss`, beside the steps."""
        return frozenset()

    def saved_groups(self) -> dict[str, Any]:
        """Not makers': they may come and go meanwhile; a sample is the same from any of them."""
        return {role: self.groups[role] for role in self.groups if role not in self.maker_roles}

    def state_dict(self) -> dict[str, Any]:
        """PPO's, the log, and the place in the prompts."""
        return super().state_dict() | {"detached": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with them; what was open is made again."""
        super().load_state_dict(state)
        start = self.run.checkpoints.start
        restores = self.config.detached.on_resume == "restore"
        folder = start / SAMPLES if restores and start is not None else None
        self.source.load_state_dict(state["detached"], folder)

    def write_more(self, folder: Path) -> None:
        """The samples that are queued, if a resume shall find them."""
        if self.config.detached.on_resume == "restore":
            self.source.write_samples(folder / SAMPLES)

    def close(self) -> None:
        """End the makers, and check and print the log."""
        self.source.close()
        self.buffer.check()
        log = self.makers_log.state_dict()
        print(log_in_words(log), flush=True)
        facts = {"ledger": log, "activity": self.activity.seconds()}
        write_whole(self.run.folder / "detached.json", json.dumps(facts))

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

    @classmethod
    def describe(
        cls, config: PPOConfig, max_columns: int | None = None, brief: bool = False
    ) -> list[str]:
        """What makers and trainers will do, then PPO's paragraphs."""
        assert isinstance(config, DetachedConfig), "this trainer's configuration"
        plan = "\n".join(plan_lines(config, max_columns, brief))
        return [plan, *super().describe(config, max_columns, brief)]
