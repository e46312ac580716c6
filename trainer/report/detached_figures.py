"""The figures of a detached run: what makers and trainers did, and how old the samples were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trainer.report.detached import STATES, DetachedRun, Seconds, speeds
from trainer.report.figures import Bar, Panel, as_svg, bars, curves, new_figure, styled
from trainer.report.read import RunData, spread

STATE_COLOURS = {"busy": "#009e73", "waiting": "#d9d9d9", "syncing": "#d55e00"}
BAR_COLOUR = "#0072b2"
MOST_ROLES, MOST_BARS = 16, 60
LAST_STEPS = 3
QUEUE = Panel(
    "Queue",
    "Samples that wait for the trainer after each step's batch was taken: at 0 the trainer waits.",
    ("detached/queue_depth",),
)
SPEED = Panel(
    "Tokens a second",
    "While busy: response tokens that a maker draws, tokens that the trainer trains on.",
    ("a maker", "the trainer"),
)


class Drawing(NamedTuple):
    """One figure: its title, what it tells, SVG, and whether it takes the page's width."""

    title: str
    about: str
    svg: str
    is_wide: bool = False


def drawings(data: RunData, run: DetachedRun) -> list[Drawing]:
    """All figures that the run has numbers for."""
    drawn = [
        Drawing(
            "Activity",
            "Where the time of each maker and trainer went.",
            activity(run.seconds),
            is_wide=True,
        ),
        Drawing(
            "Lanes",
            f"The last {LAST_STEPS} steps: what ran at the same time.",
            lanes(run, _last_seconds(data)),
            is_wide=True,
        ),
        Drawing(
            "Staleness",
            "Trained samples by the versions between their draw and their update.",
            histogram(run.staleness, "versions between draw and update"),
        ),
        Drawing(
            "Versions",
            "Trained samples by the version of the weights that drew them.",
            histogram(run.versions, "version of the weights"),
        ),
        Drawing(QUEUE.title, QUEUE.about, curves(data.metrics, QUEUE)),
        Drawing(SPEED.title, SPEED.about, curves(speeds(data.metrics), SPEED)),
    ]

    return [drawing for drawing in drawn if drawing.svg]


def activity(seconds: Seconds) -> str:
    """A bar of 100 per cent for each role."""
    roles = spread(list(seconds), MOST_ROLES)
    if not roles:
        return ""
    drawn = []
    for row, role in enumerate(roles):
        left, whole = 0.0, sum(seconds[role].values())
        for state in STATES:
            share = 100 * seconds[role][state] / whole if whole else 0.0
            text = f"{share:.0f} %" if share >= 5 else ""
            drawn.append(Bar(row, left, share, STATE_COLOURS[state], text=text))
            left += share
    return bars(
        drawn,
        dict(enumerate(roles)),
        0.9 + 0.35 * len(roles),
        "per cent of the wall time",
        STATE_COLOURS,
        "Share of the time in which each role was busy, waiting, syncing",
        x_end=100,
    )


def lanes(run: DetachedRun, seconds: float) -> str:
    """What every role did in the last `seconds`, a lane each."""
    roles = spread(list(run.intervals), MOST_ROLES)
    if not roles:
        return ""
    end = max(run.intervals[role][-1].end for role in roles)
    begin = max(end - seconds, 0.0)
    drawn = []
    for row, role in enumerate(roles):
        for interval in run.intervals[role]:
            start = max(interval.start, begin)
            if interval.state == "waiting" or interval.end <= start:
                continue  # a gap shows it
            length = interval.end - start
            title = f"{role}: {interval.state}, {interval.what}, {length:.3g} s"
            colour = STATE_COLOURS[interval.state]
            drawn.append(Bar(row, start - begin, length, colour, title))
    return bars(
        drawn,
        dict(enumerate(roles)),
        0.9 + 0.35 * len(roles),
        "seconds",
        {state: STATE_COLOURS[state] for state in ("busy", "syncing")},
        "What each role did in the last steps",
        x_end=end - begin,
    )


@styled
def histogram(counts: Mapping[int, int], label: str) -> str:
    """Samples by a number; many numbers stand together in ranges of equal width."""
    if not counts:
        return ""
    low, high = min(counts), max(counts)
    width = max(-(-(high - low + 1) // MOST_BARS), 1)
    heights: dict[int, int] = {}
    for number, count in counts.items():
        start = low + (number - low) // width * width
        heights[start] = heights.get(start, 0) + count
    figure = new_figure(4.4, 2.5, {"left": 0.16, "right": 0.98, "bottom": 0.17, "top": 0.92})
    axes = figure.add_subplot()
    middles = [start + (width - 1) / 2 for start in heights]
    axes.bar(middles, list(heights.values()), width=0.8 * width, color=BAR_COLOUR)
    axes.set_xlabel(label)
    axes.set_ylabel("samples")
    axes.locator_params(axis="x", integer=True)
    return as_svg(figure, f"Samples by {label}")


def _last_seconds(data: RunData) -> float:
    """How long the last steps took; of a run without their times, a minute."""
    _, seconds = data.series("timing_s/step")
    return sum(seconds[-LAST_STEPS:]) or 60.0
