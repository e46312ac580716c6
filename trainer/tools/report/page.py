"""`report.html`: a run folder as one page that needs no other files.

It is made only from the run folder, so you can also make it for a run that is in progress or has
failed.
"""

from __future__ import annotations

import functools
import logging
import math
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.run_folder.accounts import describe_tokens, seconds_by_role, tokens_of
from trainer.run_folder.folder import REPORT_FILE
from trainer.run_folder.metrics import SAMPLED, is_number, metric_names
from trainer.tools.report import figures as report_figures
from trainer.tools.report.calls import last_steps, overlap_share, without_pauses
from trainer.tools.report.read import (
    FAILURE_FILE,
    SAMPLED_STEPS,
    STOPPED,
    RunData,
    phase_shares,
    read_run,
)
from trainer.tools.report.summary import WATCHED, summary
from trainer.tools.report.trajectories import (
    LONGEST_TURN,
    MOST_TURNS,
    SECONDS,
    TRAJECTORIES_PER_STEP,
)
from verl_like.files import write_whole
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
            write_whole(note, mask_text(text).encode(errors="backslashreplace"), to_disk=False)
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
    write_whole(path, report_html(data), to_disk=False)
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
    marks = [change.step + 0.5 for change in data.changes]
    drawn = [(panel, report_figures.curves(data.metrics, panel, marks)) for panel in panels]
    known = metric_names(data.metrics)
    shown = {panel.title: panel.names_among(known) for panel, svg in drawn if svg}
    named = dict.fromkeys(name for names in shown.values() for name in names)
    calls, cuts = without_pauses(last_steps(data.calls, GANTT_STEPS))
    phases = phase_shares(data.metrics, data.stages)

    return {
        "name": data.folder.resolve().name,
        "overview": _overview(data),
        "failure": data.failure,
        "notes": data.notes,
        "panels": [(panel, Markup(svg)) for panel, svg in drawn if svg],
        "metrics_of": shown,
        "meanings": [(name, *report_figures.meaning_of(name)) for name in named],
        "changes": data.changes,
        "compared": data.compared,
        "refresh_s": refresh_s,
        "missing": [panel.title for panel, svg in drawn if not svg and not panel.only_if_there],
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
        "summary": summary(data),
        "starts": data.starts,
        "config": data.config,
        "outcomes": Markup(report_figures.outcomes(data.by_turns)) if data.by_turns else "",
        "seconds": SECONDS,
        "most": (SAMPLED_STEPS, TRAJECTORIES_PER_STEP, MOST_TURNS, LONGEST_TURN),
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


def reached_target(data: RunData) -> str:
    """Return the target of `trainer.stop_at` that was reached, such as "reached reward 0.75"."""
    import yaml  # type: ignore[import-untyped]

    try:
        targets = (yaml.safe_load(data.config) or {})["trainer"]["stop_at"]
    except (yaml.YAMLError, KeyError, TypeError):
        return ""
    last = data.metrics[-1] if data.metrics else {}
    for name, target in targets.items():
        if is_number(target) and last.get(name, -math.inf) >= target:
            words = {metric: word for word, metrics in WATCHED.items() for metric in metrics}
            return f"reached {words.get(name, name)} {target:g}"
    return ""


def _overview(data: RunData) -> list[tuple[str, str]]:
    """Return the lines of the summary at the top: (name, value)."""
    outcome = "failed" if data.failure else reached_target(data) or "no failure"
    if data.failure.startswith(STOPPED):
        outcome = "stopped"
    entries = [("outcome", outcome), ("steps", _steps(data))]
    _, seconds = data.series("timing_s/step")
    if seconds:
        entries.append(("time of all steps", f"{sum(seconds):.1f} s"))
    _, proven = data.series("training/num_hash_matched_samples")
    if proven:
        entries.append(("samples verified by hash", f"{sum(proven):,.0f}"))
    trained, left_out = tokens_of(data.metrics)
    if trained or left_out:
        sampled = sum(int(line.get(SAMPLED, 0)) for line in data.metrics)
        entries.append(("tokens", describe_tokens(sampled, trained, left_out)))
    _, used = data.series("perf/object_store_mib")
    if used:
        _, spilled = data.series("perf/object_store_spilled_mib")
        text = f"at most {max(used):,.0f} MiB, {sum(spilled):,.0f} MiB spilled to disk"
        entries.append(("Ray's object store", text))
    _, ratios = data.series("perf/overlap_ratio")
    if ratios:
        entries.append(("overlap ratio", f"{sum(ratios) / len(ratios):.2f}"))
    return entries
