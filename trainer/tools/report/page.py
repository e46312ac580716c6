"""`report.html`: a run folder as one page that needs no other files, and as a few lines.

It is made only from the run folder, so you can also make it for a run that is in progress or has
failed.

The page begins with a summary, which is also printed at the end of the run: the phases of a step,
the best validation, and metrics beyond the limits in `docs/metrics.md`.
"""

from __future__ import annotations

import functools
import logging
import math
import traceback
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.observers.alarms import ENTROPY_LEFT, KL_JUMP
from trainer.run_folder.accounts import describe_tokens, seconds_by_role, tokens_of
from trainer.run_folder.folder import REPORT_FILE, RESTARTS_FILE, describe_lost_steps
from trainer.run_folder.metrics import SAMPLED, is_number, metric_names
from trainer.tools.report import figures as report_figures
from trainer.tools.report.facts import alarms_of, facts_of
from trainer.tools.report.read import (
    FAILURE_FILE,
    SAMPLED_STEPS,
    STOPPED,
    RunData,
    last_steps,
    overlap_share,
    phase_shares,
    read_run,
    without_pauses,
)
from trainer.tools.report.trajectories import (
    LONGEST_TURN,
    MAX_TURNS,
    SECONDS,
    TRAJECTORIES_PER_STEP,
    shorten,
)
from verl_like.files import json_objects, write_atomic
from verl_like.masking import mask_text
from verl_like.terminal import printable

if TYPE_CHECKING:
    from jinja2 import Template


TEMPLATE = Path(__file__).with_name("template.html")
GANTT_STEPS = 3

logger = logging.getLogger(__name__)


def close_run(folder: str | Path, failure: BaseException | None) -> None:
    """Save the outcome of a run that ended, and write its report.

    An error here is only logged, because it must not hide `failure`.
    """
    if not (Path(folder) / "metrics.jsonl").exists():
        return  # the run never began: the folder may be anything
    try:
        note = Path(folder) / FAILURE_FILE
        if failure is None:
            note.unlink(missing_ok=True)
        else:
            text = "".join(traceback.format_exception(failure))
            if isinstance(failure, KeyboardInterrupt):
                is_signal = str(failure).startswith(STOPPED)
                text = f"{failure}.\n" if is_signal else f"{STOPPED}Ctrl-C.\n"
            write_atomic(note, mask_text(text).encode(errors="backslashreplace"), to_disk=False)
        data = read_run(folder)
        for line in summary(data):
            print(printable(line))
        print(f"report: {_write(data)}", flush=True)
    except OSError as err:  # for example a full disk
        logger.error("the report could not be written (%s). Try: verl-like report %s", err, folder)
    except Exception:  # noqa: BLE001 - the process edge: the run's own error follows
        logger.exception("the report could not be written. Try: verl-like report %s", folder)


def write_report(folder: str | Path) -> Path:
    """Write `report.html` of the run in `folder` atomically, and return its path.

    Example:

        page = write_report("runs/letters")         # runs/letters/report.html

    Raises:
        ConfigError: `folder` is not a run folder.
    """
    return _write(read_run(folder))


def report_html(data: RunData, refresh_s: float | None = None) -> bytes:
    """Return the page, which loads itself again every `refresh_s` seconds."""
    page = page_of(TEMPLATE).render(_content(data, refresh_s))
    # a sample's lone surrogate has no UTF-8 form, so it is escaped
    return page.encode(errors="backslashreplace")


def _write(data: RunData) -> Path:
    path = data.folder / REPORT_FILE
    write_atomic(path, report_html(data), to_disk=False)
    return path


@functools.cache
def page_of(template: Path) -> Template:
    """Return a page template that escapes text and raises for missing values."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(template.read_text(encoding="utf-8"))


def _content(data: RunData, refresh_s: float | None = None) -> dict[str, Any]:
    """Return the template's values."""
    from markupsafe import Markup

    panels = report_figures.panels_of(data.metrics)
    config = _config_of(data)
    marks = [change.step + 0.5 for change in data.changes]
    drawn = [(panel, report_figures.curves(data.metrics, panel, marks)) for panel in panels]
    absent = [panel for panel, svg in drawn if not svg and not panel.only_if_there]
    known = metric_names(data.metrics)
    shown = {panel.title: panel.names_among(known) for panel, svg in drawn if svg}
    named = dict.fromkeys(name for names in shown.values() for name in names)
    calls, cuts = without_pauses(last_steps(data.calls, GANTT_STEPS))
    phases = phase_shares(data.metrics, data.stages)
    lines = summary(data)

    return {
        "name": data.folder.resolve().name,
        "outcome": _outcome(data, config),
        "facts": facts_of(data, config),
        "alarms": [*alarms_of(data.metrics), *(x[len(WARNING) :] for x in lines if is_warning(x))],
        "overview": _overview(data),
        "failure": data.failure,
        "notes": data.notes,
        "panels": [(panel, Markup(svg)) for panel, svg in drawn if svg],
        "metrics_of": shown,
        "meanings": [(name, *report_figures.meaning_of(name)) for name in named],
        "changes": data.changes,
        "compared": data.compared,
        "refresh_s": refresh_s,
        "missing": [panel.title for panel in absent if not panel.names_among(known)],
        "near_zero": [panel.title for panel in absent if panel.names_among(known)],
        "gantt": Markup(report_figures.timeline(calls, cuts)) if calls else "",
        "gantt_steps": len({call.step for call in calls}),
        "has_cuts": bool(cuts),
        "has_pools": len({call.pool for call in calls}) > 1,
        "overlap": overlap_share(calls),
        "activity": Markup(report_figures.activity(seconds_by_role(data.metrics))),
        "ledger": data.ledger,
        "shares": Markup(report_figures.shares(phases)) if phases else "",
        "phases": phases,
        "placement": data.placement,
        "summary": [line for line in lines if not is_warning(line)],
        "starts": data.starts,
        "config": data.config,
        "outcomes": Markup(report_figures.outcomes(data.by_turns)) if data.by_turns else "",
        "seconds": SECONDS,
        "most": (SAMPLED_STEPS, TRAJECTORIES_PER_STEP, MAX_TURNS, LONGEST_TURN),
        "tables": [
            ("Samples", "samples", data.samples),
            ("Validation samples", "validated", data.validated),
        ],
    }


def _steps(data: RunData) -> str:
    """Describe the number of training steps, which may not begin at 1 in a resumed run."""
    steps = {line["step"] for line in data.metrics if line["step"] > 0}
    if not steps or len(steps) == max(steps):
        return str(len(steps))
    return f"{len(steps)} ({min(steps):.0f} to {max(steps):.0f})"


def _config_of(data: RunData) -> dict[str, Any]:
    """Return the content of `config.yaml`, or an empty dict if it cannot be read."""
    import yaml  # type: ignore[import-untyped]

    try:
        config = yaml.safe_load(data.config)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _outcome(data: RunData, config: dict[str, Any]) -> tuple[str, str, str]:
    """Return state, words and reason of a run that failed, was stopped or reached its target."""
    if data.failure.strip():
        state = "stopped" if data.failure.startswith(STOPPED) else "failed"
        reason = data.failure.strip().splitlines()[-1:]
        return (
            state,
            f"{state} after {_steps(data)} steps",
            shorten("".join(reason), LONGEST_REASON),
        )
    return "reached", reached_target(data, config), ""


def reached_target(data: RunData, config: dict[str, Any]) -> str:
    """Return the target of `trainer.stop_at` that was reached, such as "reached reward 0.75"."""
    trainer = config.get("trainer")
    targets = trainer.get("stop_at") if isinstance(trainer, dict) else None
    last = data.metrics[-1] if data.metrics else {}
    for name, target in targets.items() if isinstance(targets, dict) else ():
        if is_number(target) and last.get(name, -math.inf) >= target:
            words = {metric: word for word, metrics in WATCHED.items() for metric in metrics}
            return f"reached {words.get(name, name)} {target:g}"
    return ""


def _overview(data: RunData) -> list[tuple[str, str]]:
    """Return the numbers at the top: (name, value)."""
    entries = [
        (word, f"{first:.3g} → {last:.3g}")
        for word, first, last in changes_of(data)
        if word not in SIDE_NUMBERS
    ]
    entries += [(_best(name), f"{best:.4g}") for name, best, *_ in best_validations(data)]
    entries.append(("steps", _steps(data)))
    _, seconds = data.series("timing_s/step")
    if seconds:
        entries.append(("time of all steps", describe_seconds(sum(seconds))))
    trained, left_out = tokens_of(data.metrics)
    if trained or left_out:
        sampled = sum(int(line.get(SAMPLED, 0)) for line in data.metrics)
        text = describe_tokens(sampled, trained, left_out) if left_out else f"{trained:,}"
        entries.append(("tokens", text))
    _, used = data.series("perf/object_store_mib")
    if used:
        _, spilled = data.series("perf/object_store_spilled_mib")
        text = f"at most {max(used):,.0f} MiB, {sum(spilled):,.0f} MiB spilled to disk"
        entries.append(("Ray's object store", text))
    return entries


def _best(name: str) -> str:
    return f"best {name.removeprefix('val-core/')}"


def describe_seconds(seconds: float) -> str:
    """Return a duration, such as 18.8 s, 12 min or 3.4 h."""
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s"
    minutes = seconds / MINUTE_S
    return f"{minutes:.0f} min" if minutes < MAX_MINUTES else f"{minutes / 60:.1f} h"


MINUTE_S, MAX_MINUTES = 60, 120
LONGEST_REASON = 200
SIDE_NUMBERS = ("length", "KL")
"""Words of `WATCHED` that are no number of the first row."""


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
    return [f"{WARNING}{line}" for line in advice]


WARNING = "warning: "


def is_warning(line: str) -> bool:
    return line.startswith(WARNING)


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
    changes = [f"{word} {first:.3g} -> {last:.3g}" for word, first, last in changes_of(data)]
    return [f"{', '.join(changes)} (first -> last step)"] if changes else []


def changes_of(data: RunData) -> Iterator[tuple[str, float, float]]:
    """Yield the word, the first and the last value of the metrics that people watch."""
    for word, metrics in WATCHED.items():
        candidates = [values for _, values in map(data.series, metrics) if len(values) > 1]
        values = next((v for v in candidates if word != "KL" or any(v)), None)
        if values:
            yield word, values[0], values[-1]


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
    """Yield a line about the best and the last value of each `val-core` metric."""
    for name, best, step, last in best_validations(data):
        at_end = "" if last is None else f", {last:.4g} at the end"
        yield f"best {name}: {best:.4g} after step {step:.0f}{at_end}"


def best_validations(data: RunData) -> Iterator[tuple[str, float, float, float | None]]:
    """Yield the name, the best value and its step, and the last value if it is of another step.

    The best loss is the lowest.
    """
    for name in metric_names(data.metrics):
        steps, values = data.series(name)
        finite = [value for value in values if math.isfinite(value)]
        if not name.startswith("val-core/") or not finite:
            continue
        best = min(finite) if name.endswith("loss") else max(finite)
        step = max(step for step, value in zip(steps, values, strict=True) if value == best)
        yield name, best, step, None if step == steps[-1] else values[-1]


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
