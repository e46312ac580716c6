"""How long the calls of a run took, to correct the predictions of a plan.

run = MeasuredRun.of(folder)
run.seconds["actor", "update_actor"]    # of a call, the median over steps
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import compose
from trainer.config.flat import flat_config
from trainer.config.settings import overrides_of
from trainer.planner.cost import Gpus
from trainer.planner.job import PLACING
from trainer.planner.ppo import GENERATION, PPOJob
from trainer.ppo.recipe import PPO
from trainer.report.calls import Call
from trainer.report.read import read_run
from trainer.run_folder.folder import saved_config
from verl_like.errors import ConfigError

RoleCall = tuple[str, str]
"""A role and its method."""
WHERE = ("trainer.", "ray.", "role_workers", *PLACING)
"""Prefixes of keys that place a run and do not change what it computes."""


@dataclass(frozen=True)
class MeasuredRun:
    """Times and lengths of a run. Its first step warms up and is left out."""

    folder: Path
    seconds: Mapping[RoleCall, float]
    """Seconds of a call on its slowest rank, the median over steps."""
    ranks: Mapping[str, int]
    """Number of every role's ranks."""
    rewards: float
    """Seconds per step in which the driver scores."""
    prompt: float
    response: float
    """Mean lengths in tokens."""

    @classmethod
    def of(cls, folder: str | Path) -> MeasuredRun:
        """Read the run in this folder; raise if it has no two steps with calls."""
        data = read_run(folder)
        calls = [call for call in data.calls if call.step > 1 and call.stage]
        lines = [line for line in data.metrics if line["step"] > 1 and "timing_s/step" in line]
        if not calls or not lines:
            raise ConfigError(
                f"{folder} has no step after its first one in timeline.json and metrics.jsonl, so "
                "nothing says how long its calls take."
            )
        lanes: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        for call in data.calls:
            lanes[call.role].add((call.pool, call.lane))
        rewards, prompt, response = (
            statistics.median(line.get(name, 0.0) for line in lines)
            for name in ("timing_s/reward", "prompt_length/mean", "response_length/mean")
        )
        ranks = {role: len(of_role) for role, of_role in lanes.items()}
        return cls(data.folder, _seconds_of(calls), ranks, rewards, prompt, response)

    def factors(self, job: PPOJob) -> dict[RoleCall, float]:
        """Return how many times the predicted seconds each call took."""
        predicted = predicted_seconds(job, self.ranks)
        return {c: self.seconds[c] / predicted[c] for c in predicted if c in self.seconds}


def settings_of_run(folder: Path) -> list[str]:
    """Return the keys by which a run's configuration differs from the recipe's defaults."""
    with_model = ["data.train_files=x", f"actor_rollout_ref.model.path={folder / 'no model'}"]
    usual = flat_config(compose.load_config(with_model, PPO))
    changed = {
        key: value
        for key, value in saved_config(folder).items()
        if key in usual and value != usual[key] and not key.startswith(WHERE)
    }
    return overrides_of(changed)


def _seconds_of(calls: Sequence[Call]) -> dict[RoleCall, float]:
    """Return the seconds of each call, all turns of a step together, on its slowest lane."""
    seconds: defaultdict[tuple[RoleCall, int, str], float] = defaultdict(float)
    for call in calls:
        seconds[(call.role, call.method), call.step, call.lane] += call.end - call.start
    slowest: defaultdict[RoleCall, dict[int, float]] = defaultdict(dict)
    for (role_call, step, _), total in seconds.items():
        slowest[role_call][step] = max(total, slowest[role_call].get(step, 0.0))
    return {role_call: statistics.median(of.values()) for role_call, of in slowest.items()}


def predicted_seconds(job: PPOJob, ranks: Mapping[str, int]) -> dict[RoleCall, float]:
    """Return the predicted seconds of each call with the configured layouts, on so many ranks."""
    predicted: dict[RoleCall, float] = {}
    for role in job.roles:
        gpus = Gpus(job.device, ranks.get(role, job.num_gpus), job.per_node)
        for _, method in job.calls(role):
            if method == GENERATION:
                policy = job.config.of_role(role).actor_rollout_ref
                seconds, _ = job.decoding(role, policy, job.rows(role), gpus)
                assert seconds is not None, "a run that has generated had room for a row"
                predicted[role, method] = seconds
            elif role in job.models:
                held = job.models[role]
                predicted[role, method] = job.call_seconds(job.config, role, method, held, gpus)
    return predicted
