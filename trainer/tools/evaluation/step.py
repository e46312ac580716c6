"""One validation of one model: `val_kwargs.n` samples of every prompt, scored and averaged.

It computes the metrics of a validation in a PPO run. Its base class, `SamplingOnlyTrainer`, is for
recipes that sample and score, but do not train.
"""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, ClassVar

from trainer.data.files import check_files, is_num_prompts, row_limit
from trainer.data.lm_rows import stop_tokens
from trainer.data.prompts import PromptSet, load_tokenizer
from trainer.loop import Trainer
from trainer.ppo.validation import name_metrics, sample_all
from trainer.rollouts import preflight
from trainer.rollouts.first_prompt import first_prompt_lines
from trainer.rollouts.preflight import reject_wrong_results
from trainer.rollouts.reward_trial import try_rewards
from trainer.rollouts.rollouts import Rollouts, replaceable_roles, rollout_arguments
from trainer.run_folder.metrics import headline
from trainer.run_state import Metrics, Run, RunRecipe
from trainer.tools.evaluation.recipe import EvaluationConfig
from verl_like.errors import ConfigError
from verl_like.terminal import draw_table
from workers.config import has_environment, scores_by_rule
from workers.models.folder import set_template_variables
from workers.rewards.weighted import Rewards, make_rewards

logger = logging.getLogger(__name__)


class SamplingOnlyTrainer(Trainer):
    """Samples responses with the role `rollout`, and scores them."""

    prompt_files: ClassVar[str]
    """The key in the section `data` that names the files with prompts."""

    def __init__(self, run: Run, tokenizer: Any, rewards: Rewards, prompts: PromptSet) -> None:
        super().__init__(run)
        self.rollouts = Rollouts(self, tokenizer, rewards)
        self.prompts = prompts

    def init_arguments(self, role: str) -> dict[str, Any]:
        """Tell the rollout if prompts have images."""
        return rollout_arguments(self.groups, role, self.prompts.has_images)

    def replaceable_roles(self) -> frozenset[str]:
        """Return the rollout and the reward models."""
        return replaceable_roles(self.config, self.groups)

    @classmethod
    def prepare(cls, config: Any, at_end: ExitStack) -> tuple[Any, ...]:
        """Check the inputs; return tokenizer, rewards and prompts."""
        preflight.check_promptless_rows(config)
        check_files(config.data, [cls.prompt_files])
        preflight.check_reward_files(config)
        path = config.actor_rollout_ref.model.path
        preflight.check_model(config, "actor_rollout_ref.model.path", path)
        preflight.check_reward_models(config)
        preflight.check_rollout(config)
        tokenizer = load_tokenizer(path)
        set_template_variables(tokenizer, config.data.apply_chat_template_kwargs)
        kinds = {}
        if has_environment(config):
            from trainer.rollouts import environments

            kinds = environments.check_environment(config, tokenizer)
        prompts = PromptSet(
            config.data, cls.prompt_files, tokenizer, scores_by_rule(config), row_limit(config)
        )
        if not len(prompts):
            remedy = "Raise data.max_prompt_length."
            if not prompts.num_overlong:
                remedy = "Fix the malformed rows, which data.on_bad_row=skip leaves out."
            raise ConfigError(f"{prompts.story}: no prompt is left. {remedy}")
        logger.info("%s", prompts.story)
        if kinds:
            environments.note_players(kinds, prompts)
        preflight.note_images(config, prompts)
        preflight.check_images(config, prompts.has_images)

        rewards = make_rewards(config, tokenizer, prompts)
        at_end.enter_context(closing(rewards))
        reject_wrong_results(rewards, prompts, tokenizer, config.data.max_response_length)
        return tokenizer, rewards, prompts


def worker_code(config: Any) -> list[str]:
    """Return the worker classes, the rollout engine and the environments."""
    return [*config.role_workers.values(), *preflight.sampling_code(config)]


def describe_inputs(config: Any, *inputs: Any) -> list[str]:
    """Return the lines that a dry run prints about prompts and rewards."""
    tokenizer, rewards, prompts = inputs
    width, shown = config.data.max_response_length, list[str]()
    if not is_num_prompts(config.data.val_files):
        stop_ids = stop_tokens(tokenizer, config.actor_rollout_ref.model.path)
        shown = first_prompt_lines(prompts, tokenizer, width, stop_ids)
    _, lines = try_rewards(rewards, prompts, tokenizer, width)
    return [f"{len(prompts)} prompts", *shown, *lines]


SAMPLING_RUN = RunRecipe(
    resolve=preflight.with_full_paths,
    worker_code=worker_code,
    describe_inputs=describe_inputs,
    headline=headline,
)
"""The shared part of recipes that only sample; a recipe adds its stages."""


CORE_METRIC = re.compile(r"val-core/(?P<source>.+)/(?P<variable>[^/]+)/(?P<metric>\w+@\d+)(/mean)?")
"""Matches the metrics in the printed table, which leaves out standard deviations."""
AGENTS = "val-aux/agents/"


class Evaluation(SamplingOnlyTrainer):
    """Samples all prompts in one step with the role `rollout`, and scores the samples.

    Example:

        class Longest(Evaluation):
            def step(self):
                samples = self.rollouts.generate(next(self.prompts.in_order()), validate=True)
                return {"length/max": float(samples.padded("response_mask").sum(dim=1).max())}
    """

    config: EvaluationConfig
    recipe = replace(SAMPLING_RUN, stages=("sample",))
    prompt_files = "val_files"

    @property
    def total_steps(self) -> int:
        """One step, which has all prompts."""
        return 1

    def step(self) -> Metrics:
        """Validate, and print the table."""
        with self.clock("sample"):
            samples = sample_all(self.prompts, self.rollouts)
        self.rollouts.write("validation", samples)
        metrics = name_metrics(samples)
        print("\n".join(core_table(metrics) + played(metrics)), flush=True)
        return metrics


def played(metrics: Metrics) -> list[str]:
    """Return a line about trajectories, or nothing without an environment."""
    values = {n.removeprefix(AGENTS): value for n, value in metrics.items() if n.startswith(AGENTS)}
    if not values:
        return []
    ended = {n.removeprefix("ended/"): share for n, share in values.items() if "ended/" in n}
    ends = ", ".join(f"{name} {share:.0%}" for name, share in ended.items() if share)
    calls, errors = values["num_calls/mean"], values["num_call_errors/mean"]
    tools = f"; {calls:.3g} tool calls each, {errors:.3g} of them errors" if calls else ""
    turns = f"{values['num_turns/mean']:.3g} turns each"
    return [f"trajectories: success {values['success']:.1%}, {turns}; ended: {ends}{tools}"]


def core_table(metrics: Metrics) -> list[str]:
    """Return a row per data source: mean, best and majority of its prompts' samples."""
    cells_of: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in metrics.items():
        parts = CORE_METRIC.fullmatch(name)
        if parts:
            cells_of.setdefault((parts["source"], parts["variable"]), {})[parts["metric"]] = value
    columns = list(dict.fromkeys(metric for values in cells_of.values() for metric in values))
    rows = [["data source", "variable", *columns]]
    for (source, variable), values in cells_of.items():
        cells = [f"{values[metric]:.4g}" if metric in values else "-" for metric in columns]
        rows.append([source, variable, *cells])
    return draw_table(rows, num_titles=2, flush_right=True)
