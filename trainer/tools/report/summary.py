"""A run in a few lines, printed at its end and shown at the top of its report.

They show the phases of a step, the best validation, and metrics beyond the limits in
`docs/metrics.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from trainer.observers.alarms import ENTROPY_LEFT, KL_JUMP
from trainer.restarts import RESTARTS_FILE, describe_lost_steps
from trainer.run_folder.metrics import metric_names
from trainer.tools.report.read import RunData, phase_shares
from trainer.tools.report.trajectories import SECONDS
from verl_like.files import json_objects

CUT_ANSWERS, CLIPPED, FAILED_CALLS = 0.3, 0.2, 0.3
"""The limits besides those of alarms: fractions of responses, of tokens, and of tool calls."""
FEWEST_STEPS = 5
"""A shorter run cannot show whether it learns."""
BIGGEST_PHASES = 3
WATCHED = {
    "reward": ("critic/score/mean",),
    "length": ("response_length/mean",),
    "KL": ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"),
    "loss": ("train/loss",),
    "accuracy": ("train/accuracy", "train/rewards/accuracy"),
    "val loss": ("val/loss", "val-core/rm/loss"),
}
"""Word -> metrics, of which the first that exists is shown; a KL that is always 0 is skipped."""


def summary(data: RunData) -> list[str]:
    """Return the lines; none for a run that trained no step."""
    if not phase_shares(data.metrics, data.stages):
        return []
    best = list(_best_validations(data))
    disturbances = describe_restarts(data.folder)
    lines = [_time(data), *_first_to_last(data), *_trajectories(data), *best, *disturbances]
    return [*lines, *advice_at_end(data)]


def advice_at_end(data: RunData) -> list[str]:
    """Return the metrics beyond their limits at the run's end, each with advice."""
    advice = []
    first, share = (end(data, "response_length/clip_ratio") for end in (_first, _last))
    if share > max(CUT_ANSWERS, first / 2):  # a policy that learns to stop early has no problem
        advice.append(
            f"{share:.0%} of the responses reach data.max_response_length. Raise it, or reward "
            "shorter responses."
        )
    first, last = _first(data, "actor/entropy"), _last(data, "actor/entropy")
    if first > 0 and last < ENTROPY_LEFT * first:
        advice.append(
            f"the entropy fell from {first:.3g} to {last:.3g}: the policy has collapsed to few "
            "responses. Lower the learning rate, add a KL to the reference, or raise "
            "actor_rollout_ref.actor.entropy_coeff."
        )
    steps, norms = data.series("actor/grad_norm")
    if steps and not any(norms):
        advice.append(
            "the gradient norm was 0 in every step, so nothing was learned. Check whether all "
            "samples of a prompt have the same reward."
        )
    steps, lowest = data.series("critic/score/min")
    _, highest = data.series("critic/score/max")
    if len(steps) >= FEWEST_STEPS and lowest == highest and len(set(lowest)) == 1:
        advice.append(
            f"every sample of every step had the reward {lowest[0]:.4g}. Check the reward "
            "function against the samples in rollouts/."
        )
    clipped, moved = _last(data, "actor/pg_clipfrac"), _last(data, "actor/ppo_kl")
    if clipped > CLIPPED and "loss_mode: gspo\n" not in data.config:  # there, 0.1 is usual
        advice.append(
            f"{clipped:.0%} of the tokens are clipped in an update. Lower "
            "actor_rollout_ref.actor.optim.lr."
        )
    elif abs(moved) > KL_JUMP:
        advice.append(
            f"an update moves the policy by a KL of {moved:.3g}. Lower "
            "actor_rollout_ref.actor.optim.lr."
        )
    calls, errors = (_last(data, f"agents/num_{x}/mean") for x in ("calls", "call_errors"))
    if errors > FAILED_CALLS * calls:
        advice.append(f"{errors / calls:.0%} of the tool calls failed. See the turns in rollouts/.")
    return [f"warning: {line}" for line in advice]


def _time(data: RunData) -> str:
    """Describe how long the steps took, and in which phases."""
    shares = phase_shares(data.metrics, data.stages)
    _, seconds = data.series("timing_s/step")
    largest = sorted(shares, key=lambda phase: phase[2], reverse=True)[:BIGGEST_PHASES]
    names = [*(name for name, _, _ in largest), "the rest"]
    ends = [round(end) for end in accumulate((share for *_, share in largest), initial=0.0)]
    # rounded ends, not rounded shares, so that the percentages sum to 100
    percents = [end - start for start, end in pairwise([*ends, 100])]
    phases = ", ".join(f"{n} {share} %" for n, share in zip(names, percents, strict=True) if share)
    mean = sum(seconds) / len(seconds)
    if len(seconds) == 1:
        return f"1 step, {mean:.3g} s: {phases}"
    return f"{len(seconds)} steps, {mean:.3g} s each: {phases}"


def _first_to_last(data: RunData) -> list[str]:
    """Return a line with the first and the last value of the metrics that people watch."""
    changes = []
    for word, metrics in WATCHED.items():
        candidates = [values for _, values in map(data.series, metrics) if len(values) > 1]
        values = next((v for v in candidates if word != "KL" or any(v)), None)
        if values:
            changes.append(f"{word} {values[0]:.3g} -> {values[-1]:.3g}")
    return [f"{', '.join(changes)} (first -> last step)"] if changes else []


def _trajectories(data: RunData) -> Iterator[str]:
    """Yield a line about turns, times and outcomes of the last steps' trajectories, if any."""
    turns = _last(data, "agents/num_turns/mean")
    if math.isnan(turns):
        return
    seconds = {name: _last(data, f"agents/{name}_s/mean") for name in SECONDS}
    total = sum(seconds.values()) or 1.0
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in seconds.items())
    before = "agents/ended/"
    names = [name for name in data.metrics[-1] if name.startswith(before)]
    ends = sorted(((_last(data, name), name.removeprefix(before)) for name in names), reverse=True)
    ended = ", ".join(f"{name} {share:.0%}" for share, name in ends if share > 0)
    yield f"a trajectory: {turns:.3g} turns, {total:.3g} s ({shares}); ended: {ended}"


def _best_validations(data: RunData) -> Iterator[str]:
    """Yield the best and the last value of each `val-core` metric; the best loss is the lowest."""
    for name in metric_names(data.metrics):
        steps, values = data.series(name)
        finite = [value for value in values if math.isfinite(value)]
        if not name.startswith("val-core/") or not finite:
            continue
        best = min(finite) if name.endswith("loss") else max(finite)
        step = max(step for step, value in zip(steps, values, strict=True) if value == best)
        last = "" if step == steps[-1] else f", {values[-1]:.4g} at the end"
        yield f"best {name}: {best:.4g} after step {step:.0f}{last}"


def _first(data: RunData, name: str) -> float:
    return _mean(data.series(name)[1][:FEWEST_STEPS])


def _last(data: RunData, name: str) -> float:
    """Return the mean over the last steps, or nan if there is no value: nan exceeds no limit."""
    return _mean(data.series(name)[1][-FEWEST_STEPS:])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def describe_restarts(folder: Path) -> list[str]:
    """Describe the restarts and the affected samples in a line, and moves in another."""
    lines, _ = json_objects(folder / RESTARTS_FILE)
    moves = [str(line.get("step")) for line in lines if "moved" in line]
    moved = [f"moved from drained nodes: after step {', '.join(moves)}"] if moves else []
    steps = [str(line.get("step")) for line in lines if "lost" in line]
    if not steps:
        return moved
    sources = ""
    for line in lines:
        if "state_from" in line:
            lost = describe_lost_steps(line["finished_steps_made_again"])
            sources += f"; in step {line['step']} with the state of {line['state_from']}, {lost}"
    num_kept = sum(line["samples_kept"] for line in lines if "samples_kept" in line)
    again = sum(line["samples_made_again"] for line in lines if "samples_made_again" in line)
    samples = ""
    if num_kept + again:
        samples = f"; samples of lost groups: {num_kept} kept, {again} regenerated"
    return [f"restarts: {len(steps)}, in step {', '.join(steps)}{sources}{samples}", *moved]
