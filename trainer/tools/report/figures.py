"""The report's figures, drawn by matplotlib as SVG for the HTML page."""

from __future__ import annotations

import functools
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from trainer.run_folder.metrics import MetricLines, evenly_spaced, metric_names, series
from trainer.tools.report.read import TracedCall, pools_at_work
from trainer.tools.report.trajectories import FAILED, NO_SUCCESS, PARTIAL, SUCCESS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c510a")
METHOD_COLORS = {
    "generate_sequences": "#009e73",
    "collect": "#009e73",
    "compute_log_prob": "#56b4e9",
    "compute_ref_log_prob": "#8c510a",
    "compute_values": "#e69f00",
    "update_actor": "#0072b2",
    "update_critic": "#d55e00",
    "environments": "#cc79a7",
}
STATE_COLORS = {"busy": "#009e73", "waiting": "#d9d9d9", "syncing": "#d55e00"}
OUTCOME_COLORS = {
    SUCCESS: "#009e73", PARTIAL: "#9fd8c6", NO_SUCCESS: "#d9d9d9", FAILED: "#d55e00",
}  # fmt: skip
OTHER_COLOR, OVERLAP_COLOR = "#9a9a9a", "#222222"
NEGLIGIBLE = 1e-6
"""Numbers up to this size are rounding errors in panels that leave zeros out."""
MAX_POINTS, MAX_LANES = 1000, 16
ABOVE: Mapping[str, Any] = {
    "loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.3, "handlelength": 1.4,
    "columnspacing": 1.2,
}  # fmt: skip
"""Place of a legend: above the axes, so that it covers no curve."""
SMOOTHED_FROM, WINDOWS = 300, 50
"""The number of points from which a curve gets a running mean, and its number of windows."""
STYLE = Path(__file__).with_name("figures.mplstyle")
PANELS_FILE = Path(__file__).with_name("panels.yaml")
METRICS_FILE = Path(__file__).with_name("metrics.yaml")


class Panel(NamedTuple):
    """One figure of curves, as in `panels.yaml`."""

    title: str
    caption: str
    names: Sequence[str]
    """Metrics, or patterns of their names."""
    band: str = ""
    leaves_out_zero: bool = False
    only_if_there: bool = False
    """True if the report omits the panel without a remark when a run has none of its metrics."""

    def names_among(self, known: Iterable[str]) -> list[str]:
        """Return the known metrics that the panel shows, in the order of its names."""
        return [name for pattern in self.names for name in known if fnmatchcase(name, pattern)]


BOOKKEEPING = ("step", "timing", "perf/", "val-", "training/")
"""Prefixes of metrics that do not show what a run learned."""
MAX_OWN_PANELS = 12


@functools.cache
def known_panels() -> list[Panel]:
    """Return the figures of a PPO run."""
    import yaml  # type: ignore[import-untyped]

    return [Panel(**fields) for fields in yaml.safe_load(PANELS_FILE.read_text(encoding="utf-8"))]


@functools.cache
def meanings() -> dict[str, tuple[str, str]]:
    """Return metric, or pattern of metrics -> unit and meaning."""
    import yaml

    groups = yaml.safe_load(METRICS_FILE.read_text(encoding="utf-8"))
    return {name: tuple(row) for rows in groups.values() for name, row in rows.items()}


def meaning_of(metric: str) -> tuple[str, str]:
    """Return unit and meaning of a metric; empty texts if none is known."""
    known = meanings()
    matching = (row for name, row in known.items() if fnmatchcase(metric, name))
    return known.get(metric) or next(matching, ("", ""))


def panels_of(metrics: MetricLines) -> list[Panel]:
    """Return PPO's figures, or for a run of another recipe figures of its first metrics."""
    known = metric_names(metrics)
    learned = [name for name in known if not name.startswith(BOOKKEEPING)]
    always = [panel for panel in known_panels() if not panel.only_if_there]
    if not learned or any(panel.names_among(learned) for panel in always):
        return [panel for panel in known_panels() if panel in always or panel.names_among(known)]

    validated = [name for name in known if name.startswith("val-core/")]
    panels = [Panel(name, "", (name,)) for name in [*learned[:MAX_OWN_PANELS], *validated]]
    overlap = next(panel for panel in known_panels() if panel.title == "Overlap")
    return [*panels, overlap] if overlap.names_among(known) else panels


def styled(draw: Callable[P, str]) -> Callable[P, str]:
    """Draw with `figures.mplstyle`, without changing matplotlib's settings for other code."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> str:
        from matplotlib import rc_context

        with rc_context(fname=STYLE):
            return draw(*args, **kwargs)

    return styled


@styled
def curves(metrics: MetricLines, panel: Panel, marks: Sequence[float] = ()) -> str:
    """Return a panel as SVG, with vertical lines at `marks`, or "" if there is nothing to draw."""
    known = metric_names(metrics)
    names = panel.names_among(known)
    if panel.leaves_out_zero:
        names = [n for n in names if any(abs(x) > NEGLIGIBLE for x in series(metrics, n)[1])]
    if not names:
        return ""

    # two longer names next to each other are wider than the figure
    columns = 1 if max(map(len, names)) > 24 else 2
    # axes of one size for every panel, with room above for the lines of a legend
    lines = -(-min(len(names), len(COLORS)) // columns)
    height = 2.3 + 0.17 * lines
    edges = {"bottom": 0.42 / height, "top": 1 - (0.1 + 0.17 * lines) / height}
    figure = new_figure(4.4, height, {"left": 0.16, "right": 0.98, **edges})
    axes = figure.add_subplot()
    if panel.band:
        axes.fill_between(*_band(metrics, panel.band), color=COLORS[0], alpha=0.15, linewidth=0)
    for mark in marks:
        axes.axvline(mark, color="#888888", linewidth=1.0, linestyle=":")

    drawn: list[Any] = []
    for name, color in zip(names, COLORS, strict=False):
        steps, values = _thin(*series(metrics, name))
        if values in drawn:  # rewards equal the scores if nothing is subtracted
            continue
        drawn.append(values)
        if len(steps) > SMOOTHED_FROM:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            steps, values = _thin(*running_mean(*series(metrics, name)))
        axes.plot(
            steps,
            values,
            color=color,
            label=name,
            marker="." if len(steps) < 30 else "",
            linewidth=1.4,
        )

    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    # next to the exponent of the numbers, which is at the axes' corner
    axes.legend(**{**ABOVE, "bbox_to_anchor": (0.1, 1)}, ncols=columns)
    return as_svg(figure, f"{panel.title} by step: {', '.join(names)}")


def _band(metrics: MetricLines, name: str) -> tuple[list[float], list[float], list[float]]:
    """Return steps, lower and upper end: one standard error around the mean, or the extremes."""
    ends = ("mean", "standard_error")
    errors = [line for line in metrics if all(f"{name}/{end}" in line for end in ends)]
    if errors:
        steps, means = _thin(*series(errors, f"{name}/mean"))
        _, around = _thin(*series(errors, f"{name}/standard_error"))
        low = [mean - error for mean, error in zip(means, around, strict=True)]
        return steps, low, [mean + error for mean, error in zip(means, around, strict=True)]
    steps, low = _thin(*series(metrics, f"{name}/min"))
    return steps, low, _thin(*series(metrics, f"{name}/max"))[1]


class Bar(NamedTuple):
    """A horizontal bar of a figure."""

    row: float
    start: float
    length: float
    color: str
    title: str = ""
    """Text of the tooltip."""
    text: str = ""
    """Text on the bar."""
    height: float = 0.7


@styled
def bars(
    drawn: Sequence[Bar],
    rows: Mapping[float, str],
    height: float,
    x_label: str,
    legend: Mapping[str, str],
    description: str,
    *,
    x_end: float | None = None,
    lines: Sequence[float] = (),
    cuts: Sequence[float] = (),
) -> str:
    """Return bars in rows from top to bottom, as SVG.

    - `rows`: position -> name.
    - `legend`: name -> color.
    - `lines`: positions of lines between rows.
    - `cuts`: times of dotted vertical lines.
    """
    figure = new_figure(9.5, height)
    axes = figure.add_subplot()
    titles = {}
    for number, bar in enumerate(drawn):
        shape = axes.barh(bar.row, bar.length, left=bar.start, height=bar.height, color=bar.color)[
            0
        ]
        if bar.title:
            shape.set_gid(f"bar-{number}")
            titles[f"bar-{number}"] = bar.title
        if bar.text:
            axes.text(bar.start + bar.length / 2, bar.row, bar.text, ha="center", va="center")
    for line in lines:
        axes.axhline(line, color="#888888", linewidth=0.8)
    for cut in cuts:
        axes.axvline(cut, color="#888888", linewidth=1.0, linestyle=":")
    axes.set_yticks(list(rows), list(rows.values()))
    if rows:
        axes.set_ylim(max(rows) + 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    if x_end is not None:
        axes.set_xlim(0, x_end)
    axes.set_xlabel(x_label)
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=name) for name, color in legend.items()]
    axes.legend(handles=patches, **ABOVE, ncols=4)
    return as_svg(figure, description, titles)


def timeline(calls: Sequence[TracedCall], cuts: Sequence[float] = ()) -> str:
    """Return the calls as a Gantt chart; dotted lines mark `cuts`.

    A lane is for one pool, role and rank; there are at most `MAX_LANES`. With several pools, a row
    at the bottom shows when they were busy at the same time.
    """
    shown = evenly_spaced(sorted({(call.pool, call.lane) for call in calls}), MAX_LANES)
    row_of = {lane: row for row, lane in enumerate(shown)}
    origin, under = calls[0].start, len(shown) + 0.2
    drawn = []
    for call in calls:
        row = row_of.get((call.pool, call.lane))
        if row is not None:
            seconds, color = call.end - call.start, METHOD_COLORS.get(call.method, OTHER_COLOR)
            title = f"{call.lane}: {call.method}, {1000 * seconds:.1f} ms{call.details}"
            drawn.append(Bar(row, call.start - origin, seconds, color, title, height=0.74))
    pools = [pool for pool, _ in shown]
    ends = [row + 0.5 for row, pool in enumerate(pools) if pools[row + 1 : row + 2] != [pool]]
    rows: dict[float, str] = {row: f"{pool}  {lane}" for row, (pool, lane) in enumerate(shown)}
    if len({call.pool for call in calls}) > 1:
        rows[under] = "2 or more pools at work"
        for start, end, number in pools_at_work(calls):
            if number > 1:
                drawn.append(Bar(under, start - origin, end - start, OVERLAP_COLOR, height=0.5))
    return bars(
        drawn,
        rows,
        1.3 + 0.3 * len(rows),
        "seconds",
        {c.method: METHOD_COLORS.get(c.method, OTHER_COLOR) for c in calls},
        "Timeline of the last steps, a lane for each pool, role and rank",
        lines=ends,
        cuts=[cut - origin for cut in cuts],
    )


def shares(rows: Sequence[tuple[str, float, float]]) -> str:
    """Return an SVG chart with one bar: the phases' percentages of a step."""
    left, drawn, legend = 0.0, [], {}
    for (name, _, share), color in zip(rows, COLORS, strict=False):
        drawn.append(Bar(0, left, share, color, height=0.6))
        legend[f"{name} {share:.1f} %"] = color
        left += share
    words = ", ".join(f"{name} {share:.1f} %" for name, _, share in rows)
    return bars(
        drawn, {}, 1.3, "% of a step", legend, f"Fractions of a step's time: {words}", x_end=100
    )


def activity(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """Return an SVG chart of roles: percentages of time busy, waiting and syncing."""
    roles = [
        role for role in evenly_spaced(list(seconds), MAX_LANES) if sum(seconds[role].values()) > 0
    ]
    if not roles:
        return ""
    drawn = []
    for row, role in enumerate(roles):
        left, total = 0.0, sum(seconds[role].values())
        for state, spent in seconds[role].items():
            share = 100 * spent / total
            text = f"{share:.0f} %" if share >= 5 else ""
            drawn.append(Bar(row, left, share, STATE_COLORS[state], text=text))
            left += share
    return bars(
        drawn,
        dict(enumerate(roles)),
        0.9 + 0.35 * len(roles),
        "% of the wall time",
        STATE_COLORS,
        "Fraction of the time in which each role was busy, waiting, syncing",
        x_end=100,
    )


def outcomes(by_turns: Mapping[str, Mapping[str, int]]) -> str:
    """Return an SVG chart with a bar per number of turns: its trajectories by outcome."""
    drawn = []
    for row, counts in enumerate(by_turns.values()):
        left, total = 0, sum(counts.values())
        for outcome, color in OUTCOME_COLORS.items():
            number = counts.get(outcome, 0)
            if number:
                title = f"{outcome}: {number} of {total}"
                drawn.append(Bar(row, left, number, color, title))
                left += number
    words = "; ".join(
        f"{turns} turns: {counts.get(SUCCESS, 0)} of {sum(counts.values())}"
        for turns, counts in by_turns.items()
    )
    return bars(
        drawn,
        {row: f"{turns} turn{'' if turns == '1' else 's'}" for row, turns in enumerate(by_turns)},
        0.9 + 0.3 * len(by_turns),
        "trajectories",
        OUTCOME_COLORS,
        f"Success by turns: {words}",
    )


def new_figure(width: float, height: float, margins: Mapping[str, float] | None = None) -> Figure:
    """Return an empty figure; fixed `margins` skip the layout, which is slower than drawing."""
    from matplotlib.figure import Figure

    if margins is None:
        return Figure(figsize=(width, height), layout="constrained")
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(**margins)
    return figure


def running_mean(
    steps: Sequence[float], values: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return the mean over a window around each step, narrower at the ends, without nan and inf."""
    import numpy as np

    finite = np.isfinite(values)
    window = np.ones(2 * (len(values) // (2 * WINDOWS)) + 1)
    sums = np.convolve(np.where(finite, values, 0.0), window, mode="same")
    number = np.convolve(finite, window, mode="same")
    means = np.where(number > 0, sums / np.maximum(number, 1), np.nan)
    return list(steps), means.tolist()


def _thin(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most `MAX_POINTS` points, because a screen cannot show more."""
    points = evenly_spaced(list(zip(steps, values, strict=True)), MAX_POINTS)
    return [step for step, _ in points], [value for _, value in points]


def as_svg(figure: Figure, description: str, titles: Mapping[str, str] | None = None) -> str:
    """Return the figure as an `svg` element with a description.

    `titles` maps the id of an SVG group to its tooltip.
    """
    text = io.StringIO()
    figure.savefig(
        text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    label = html.escape(description, quote=True)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    for gid, title in (titles or {}).items():
        svg = svg.replace(
            f'<g id="{gid}">', f'<g id="{gid}"><title>{html.escape(title)}</title>', 1
        )
    return svg
