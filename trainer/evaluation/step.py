"""One validation of one model: `val_kwargs.n` samples of every prompt, scored and counted.

The numbers are those of a validation in a PPO run of the same weights, seed and settings.
"""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import Any

from trainer.data.prompts import PromptSet, load_tokenizer
from trainer.evaluation.config import EvaluationConfig
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Metrics
from trainer.ppo.preflight import check_model, check_reward_models, check_rollout
from trainer.ppo.reward_trial import try_rewards
from trainer.ppo.sampling import SamplingTrainer
from trainer.ppo.validation import name_metrics, sample_all
from verl_like.errors import ConfigError
from verl_like.terminal import draw_table, terminal_width
from workers.config import scores_by_rule
from workers.rewards.weighted import Rewards, make_rewards

CORE_METRIC = re.compile(r"val-core/(?P<source>.+)/(?P<variable>[^/]+)/(?P<metric>\w+@\d+)(/mean)?")
"""The means that are shown; the bootstrap's deviations are in metrics.jsonl."""
logger = logging.getLogger(__name__)


class Evaluation(SamplingTrainer):
    """Drives the role `rollout`, and those of reward models, once through all prompts."""

    config: EvaluationConfig
    stages = ("gen",)

    def __init__(
        self,
        config: EvaluationConfig,
        groups: WorkerGroups,
        tokenizer: Any,
        rewards: Rewards,
        prompts: PromptSet,
    ) -> None:
        """Nothing is computed yet; `fit` does it all."""
        super().__init__(config, groups, tokenizer, rewards)
        self.prompts = prompts

    @classmethod
    def prepare(cls, config: EvaluationConfig, at_end: ExitStack) -> tuple[Any, ...]:
        """Tokenizer, rewards and prompts."""
        path = config.actor_rollout_ref.model.path
        check_model(config, "actor_rollout_ref.model.path", path)
        check_reward_models(config)
        check_rollout(config)
        tokenizer = load_tokenizer(path)
        prompts = PromptSet(config.data, "val_files", tokenizer, scores_by_rule(config))
        if not len(prompts):
            raise ConfigError(f"{prompts.story}: no prompt is left.")
        logger.info("%s", prompts.story)

        rewards = make_rewards(config, tokenizer, prompts.data_sources)
        at_end.enter_context(closing(rewards))
        return tokenizer, rewards, prompts

    @classmethod
    def look_at(cls, config: EvaluationConfig, *inputs: Any) -> list[str]:
        """Prompts and rewards."""
        tokenizer, rewards, prompts = inputs
        width = config.data.max_response_length
        _, lines = try_rewards(rewards, prompts, tokenizer, width)
        return [f"{len(prompts)} prompts", *lines]

    @property
    def total_steps(self) -> int:
        """All prompts are one step."""
        return 1

    def step(self) -> Metrics:
        """The validation, and its table on the terminal."""
        sampling = asdict(self.config.actor_rollout_ref.rollout.val_kwargs)
        score = partial(self.with_rewards, normalize=False)
        with self.clock("gen"):
            samples = sample_all(self.prompts.in_order(), self.roll_out, score, **sampling)
        self.write_samples("validation", samples)
        metrics = name_metrics(samples)
        print("\n".join(core_table(metrics, terminal_width())), flush=True)
        return metrics


def core_table(metrics: Metrics, width: int | None = None) -> list[str]:
    """A row for each data source: the mean, the best and the majority of its prompts' samples."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in metrics.items():
        if parts := CORE_METRIC.fullmatch(name):
            found.setdefault((parts["source"], parts["variable"]), {})[parts["metric"]] = value
    columns = list(dict.fromkeys(metric for values in found.values() for metric in values))
    rows = [["data source", "variable", *columns]]
    for (source, variable), values in found.items():
        cells = [f"{values[metric]:.4g}" if metric in values else "-" for metric in columns]
        rows.append([source, variable, *cells])
    return draw_table(rows, width, num_titles=2, flush_right=True)
