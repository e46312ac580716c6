"""A run's own calls, beside what the planner says of them.

    run = MeasuredRun.of(folder)
    run.seconds["actor", "update_actor"]    # of a call, the median over steps

`fitted` finds the rates of a device by which the calls of runs on it are predicted best; `factors`
say how much longer each call of one run took than predicted.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config import compose
from trainer.config.flat import flat_config
from trainer.config.settings import overrides_of
from trainer.planner.cost import Cards
from trainer.planner.devices import Device
from trainer.planner.job import PLACING
from trainer.planner.layouts import GENERATION, PPOJob
from trainer.ppo.recipe import PPO
from trainer.report.calls import Call
from trainer.report.read import RunData, read_run
from trainer.run_folder.folder import saved_config
from verl_like.errors import ConfigError
from workers.parallel.sharding import dims_of

RoleCall = tuple[str, str]
"""A role and its method."""


@dataclass(frozen=True)
class MeasuredRun:
    """What a run folder says of times and lengths; the first step warms up and is left out."""

    folder: Path
    seconds: Mapping[RoleCall, float]
    """Of a call on its slowest rank, the median over steps."""
    cards: Mapping[str, int]
    """Role -> ranks."""
    step: float
    rewards: float
    """Seconds of a step in which the driver scores."""
    prompt: float
    response: float
    """Mean lengths in tokens."""

    @classmethod
    def of(cls, folder: str | Path) -> MeasuredRun:
        """The run in this folder; one without two steps and their calls is refused."""
        data = read_run(folder)
        calls = [call for call in data.calls if call.step > 1 and call.stage]
        lines = [line for line in data.metrics if line["step"] > 1 and "timing_s/step" in line]
        if not calls or not lines:
            raise ConfigError(
                f"{folder} has no step behind its first one in timeline.json and metrics.jsonl: "
                "nothing says how long its calls take."
            )

        def median(name: str) -> float:
            return statistics.median(line.get(name, 0.0) for line in lines)

        return cls(
            folder=data.folder,
            seconds=_seconds_of(calls),
            cards=_ranks_of(data),
            step=median("timing_s/step"),
            rewards=median("timing_s/reward"),
            prompt=median("prompt_length/mean"),
            response=median("response_length/mean"),
        )

    def factors(self, job: PPOJob) -> dict[RoleCall, float]:
        """How many times the predicted seconds each call took."""
        found = own_seconds(job, job.device, self.cards)
        return {call: self.seconds[call] / found[call] for call in found if call in self.seconds}


def settings_of_run(folder: Path) -> list[str]:
    """The keys by which the run's configuration differs from the recipe's, where it ran aside."""
    with_model = ["data.train_files=x", f"actor_rollout_ref.model.path={folder / 'no model'}"]
    usual = flat_config(compose.load_config(with_model, PPO))
    found = {
        key: value
        for key, value in saved_config(folder).items()
        if key in usual and value != usual[key] and not key.startswith(WHERE)
    }
    return overrides_of(found)


WHERE = ("trainer.", "ray.", "role_workers", *PLACING)
"""How the keys begin that say where a run is, and not what it computes."""


def _seconds_of(calls: Sequence[Call]) -> dict[RoleCall, float]:
    """Of each call in a step, all turns of it together, on the lane where it takes longest."""
    lanes: defaultdict[tuple[RoleCall, int], defaultdict[str, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for call in calls:
        lanes[(call.role, call.method), call.step][call.lane] += call.end - call.start
    steps: defaultdict[RoleCall, list[float]] = defaultdict(list)
    for (role_call, _), seconds in lanes.items():
        steps[role_call].append(max(seconds.values()))
    return {role_call: statistics.median(of) for role_call, of in steps.items()}


def _ranks_of(data: RunData) -> dict[str, int]:
    """Role -> lanes that its calls are on."""
    lanes: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for call in data.calls:
        lanes[call.role].add((call.pool, call.lane))
    return {role: len(of) for role, of in lanes.items()}


def own_seconds(job: PPOJob, device: Device, cards: Mapping[str, int]) -> dict[RoleCall, float]:
    """Predicted seconds of each call as the job's keys lay its roles out, on so many ranks."""
    found: dict[RoleCall, float] = {}
    for role, calls in job.calls.items():
        on = Cards(device, cards.get(role, job.num_cards), job.per_node)
        for _, method in calls:
            if method == GENERATION:
                policy = job.config.of_role(role).actor_rollout_ref
                seconds, _ = job.decoding(role, policy, job.rows(role), on)
                assert seconds is not None, "a run that has generated had room for a row"
                found[role, method] = seconds
            elif role in job.models:
                held, tokens = job.models[role], next(iter(job.passes(role).sizes.values()))
                dims = dims_of(on.num, held.sharding)
                found[role, method] = job.call_seconds(role, method, held, dims, on, tokens)
    return found


# --------------------------------------------------------------------------- rates of a device

OF_PASSES = ("flops", "read_flops", "link", "layer", "collective", "call")
OF_DECODING = ("decode_layer", "decode_row")
"""The `Rates` that are unknown of a device."""
SHARES = ("flops", "read_flops", "link")
"""Those of them that something is divided by."""


def fitted(device: Device, runs: Sequence[tuple[PPOJob, MeasuredRun]]) -> Device:
    """The device with the numbers by which all calls of these runs are predicted best.

    A call's seconds are a sum of unknowns times what the cost model counts. The column of an
    unknown is what the model says where it alone costs something. What no run shows
    stays as it was.
    """
    passes, decoding = _calls_of(runs, of_generation=False), _calls_of(runs, of_generation=True)
    device = _solved(device, OF_PASSES, runs, passes)
    return _solved(device, OF_DECODING, runs, decoding)


def _calls_of(
    runs: Sequence[tuple[PPOJob, MeasuredRun]], of_generation: bool
) -> list[tuple[int, RoleCall]]:
    return [
        (number, call)
        for number, (_, run) in enumerate(runs)
        for call in run.seconds
        if (call[1] == GENERATION) == of_generation
    ]


def _solved(
    device: Device,
    unknowns: Sequence[str],
    runs: Sequence[tuple[PPOJob, MeasuredRun]],
    calls: Sequence[tuple[int, RoleCall]],
) -> Device:
    def predicted(at: Device) -> NDArray[np.float64]:
        found = [own_seconds(job, at, run.cards) for job, run in runs]
        return np.array([found[number].get(call, 0.0) for number, call in calls])

    seconds = np.array([runs[number][1].seconds[call] for number, call in calls])
    at_no_cost = _with(device, **dict.fromkeys(unknowns, 0.0))
    known = predicted(at_no_cost)
    columns = [predicted(_with(at_no_cost, **{name: 1.0})) - known for name in unknowns]
    shown = [number for number, column in enumerate(columns) if column.any()]
    matrix = np.stack([columns[number] for number in shown], axis=1) / seconds[:, None]
    found = _least_squares(matrix, 1 - known / seconds)
    return _with(device, **{unknowns[n]: value for n, value in zip(shown, found, strict=True)})


def _with(device: Device, **costs: float) -> Device:
    """The device with these rates; of a share its inverse is given, for what it costs."""
    changed: dict[str, Any] = {
        name: 1 / max(cost, NOTHING) if name in SHARES else cost for name, cost in costs.items()
    }
    return replace(device, rates=replace(device.rates, **changed))


NOTHING = 1e-30


def _least_squares(matrix: NDArray[np.float64], goal: NDArray[np.float64]) -> list[float]:
    """The numbers from 0 up that times the columns come nearest to the goal: of every choice of
    columns that are not 0, which are few."""
    best, nearest = np.zeros(matrix.shape[1]), np.inf
    for count in range(1, matrix.shape[1] + 1):
        for chosen in map(list, combinations(range(matrix.shape[1]), count)):
            found = np.linalg.lstsq(matrix[:, chosen], goal, rcond=None)[0]
            error = float(np.square(matrix[:, chosen] @ found - goal).sum())
            if (found >= 0).all() and error < nearest - 1e-12:
                best, nearest = np.zeros(matrix.shape[1]), error
                best[chosen] = found
    return list(map(float, best))
