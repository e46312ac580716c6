"""One validation of one model: `val_kwargs.n` samples of every prompt, scored and averaged.

It computes the metrics of a validation in a PPO run.
"""

from __future__ import annotations

import re
from dataclasses import replace

from trainer.ppo.validation import name_metrics, sample_all
from trainer.rollouts.without_training import SAMPLING_RUN, SamplingOnlyTrainer
from trainer.run_state import Metrics
from trainer.tools.evaluation.recipe import EvaluationConfig
from verl_like.terminal import draw_table

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
