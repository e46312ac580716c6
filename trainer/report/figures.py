"""The report's figures, drawn by matplotlib as SVG that stands inside a page."""

from __future__ import annotations

import functools
import html
import io
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from trainer.report.calls import Call, pools_at_work
from trainer.report.read import RunData, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c510a")
METHOD_COLOURS = {
    "generate_sequences": "#009e73",
    "compute_log_prob": "#56b4e9",
    "compute_ref_log_prob": "#8c510a",
    "compute_values": "#e69f00",
    "update_actor": "#0072b2",
    "update_critic": "#d55e00",
}
OTHER_COLOUR, OVERLAP_COLOUR = "#9a9a9a", "#222222"
MOST_POINTS, MOST_LANES = 1000, 16
SMOOTHED_FROM, WINDOWS = 300, 50
"""Points from which a curve has its running mean on top, over a part in so many of them."""
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


class Panel(NamedTuple):
    """One figure of curves: its title, what it tells, and the metrics in it."""

    title: str
    about: str
    names: tuple[str, ...]
    """Metrics; `*` stands for any end of a name."""
    band: str = ""
    """`<band>/min` to `<band>/max` is shaded."""
    leaves_out_zero: bool = False
    """Whether metrics that are 0 in every step are no part of it."""


PANELS = (
    Panel(
        "Reward",
        "Mean score of a step's samples; the band is lowest to highest.",
        ("critic/score/mean", "critic/rewards/mean", "val-core/*"),
        "critic/score",
    ),
    Panel(
        "KL",
        "Distance from the reference (reward, loss) and of one update (ppo_kl).",
        ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"),
        leaves_out_zero=True,  # a policy that is held against itself
    ),
    Panel(
        "Entropy",
        "Of the policy, in nats a token. A fall to 0 is a collapse.",
        ("actor/entropy", "actor/entropy_loss"),
    ),
    Panel(
        "Lengths",
        "Tokens of a response (band: shortest to longest) and of a prompt.",
        ("response_length/mean", "prompt_length/mean"),
        "response_length",
    ),
    Panel("Policy loss", "PPO's clipped objective.", ("actor/pg_loss",)),
    Panel("Value loss", "The critic's clipped squared error.", ("critic/vf_loss",)),
    Panel("Gradient norms", "Before clipping.", ("actor/grad_norm", "critic/grad_norm")),
    Panel(
        "Clipped",
        "Share of tokens outside PPO's clip range.",
        ("actor/pg_clipfrac", "critic/vf_clipfrac"),
    ),
    Panel(
        "Mismatch",
        "Rollout's against trainer's probabilities of the same tokens.",
        ("training/rollout_probs_diff_*", "rollout_corr/kl", "rollout_corr/k3_kl"),
    ),
    Panel(
        "Overlap",
        "Time in which roles worked, over wall time: 1 is taking turns, 2 is side by side.",
        ("perf/overlap_ratio", "perf/overlap_ratio_update"),
    ),
    Panel("Speed", "Tokens a second and device.", ("perf/throughput",)),
)
REWARD_PARTS = Panel(
    "Rewards by name",
    "What each reward and its parts gave, before weights.",
    ("reward/*/mean",),
)
BOOKKEEPING = ("step", "timing", "perf/", "val-", "training/")
"""How the names of numbers begin that say nothing of what is learned."""
MOST_OWN_PANELS = 12


def panels_of(data: RunData) -> list[Panel]:
    """The figures of a run: the known ones, or one for each number of another recipe's steps."""
    known = dict.fromkeys(name for line in data.metrics for name in line)
    learned = [name for name in known if not name.startswith(BOOKKEEPING)]
    wanted = [name for panel in PANELS for name in panel.names]
    if not learned or any(fnmatchcase(name, pattern) for name in learned for pattern in wanted):
        has_parts = any(fnmatchcase(name, REWARD_PARTS.names[0]) for name in known)
        return [PANELS[0], *([REWARD_PARTS] if has_parts else []), *PANELS[1:]]

    validated = [name for name in known if name.startswith("val-core/")]
    own = [Panel(name, "", (name,)) for name in [*learned[:MOST_OWN_PANELS], *validated]]
    shared = [panel for panel in PANELS if panel.title == "Overlap"]
    return own + shared


def styled(draw: Callable[P, str]) -> Callable[P, str]:
    """Draw with `RC`, leaving matplotlib's own settings to the rest of the process."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> str:
        from matplotlib import rc_context

        with rc_context(RC):
            return draw(*args, **kwargs)

    return styled


@styled
def curves(data: RunData, panel: Panel) -> str:
    """A panel as SVG; empty when the run has none of its metrics."""
    known = dict.fromkeys(name for line in data.metrics for name in line)
    names = [name for wanted in panel.names for name in known if fnmatchcase(name, wanted)]
    if panel.leaves_out_zero:
        names = [name for name in names if any(data.series(name)[1])]
    if not names:
        return ""

    figure = new_figure(4.4, 2.5, {"left": 0.16, "right": 0.98, "bottom": 0.17, "top": 0.92})
    axes = figure.add_subplot()
    if panel.band and f"{panel.band}/min" in known:
        low, high = (_thin(*data.series(f"{panel.band}/{end}")) for end in ("min", "max"))
        axes.fill_between(low[0], low[1], high[1], color=COLOURS[0], alpha=0.12, linewidth=0)

    drawn: list[Any] = []
    for name, colour in zip(names, COLOURS, strict=False):
        steps, values = _thin(*data.series(name))
        if values in drawn:  # rewards are the scores where nothing is subtracted
            continue
        drawn.append(values)
        if len(steps) > SMOOTHED_FROM:
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            steps, values = _thin(*running_mean(*data.series(name)))
        axes.plot(
            steps,
            values,
            color=colour,
            label=name,
            marker="." if len(steps) < 30 else "",
            linewidth=1.4,
        )

    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="best")
    return as_svg(figure, f"{panel.title} by step: {', '.join(names)}")


@styled
def timeline(calls: Sequence[Call], cuts: Sequence[float] = ()) -> str:
    """The calls as a Gantt chart, a lane for each pool, role and rank; dotted where time was cut.

    Under it stands when pools worked at the same time.
    """
    shown = spread(sorted({(call.pool, call.lane) for call in calls}), MOST_LANES)
    row_of = {lane: row for row, lane in enumerate(shown)}
    origin = calls[0].start

    figure = new_figure(9.5, 1.6 + 0.3 * len(shown))
    axes = figure.add_subplot()
    titles = {}
    for number, call in enumerate(calls):
        row = row_of.get((call.pool, call.lane))
        if row is not None:
            colour = METHOD_COLOURS.get(call.method, OTHER_COLOUR)
            (bar,) = axes.barh(
                row, call.end - call.start, left=call.start - origin, height=0.74, color=colour
            )
            bar.set_gid(f"call-{number}")
            titles[f"call-{number}"] = (
                f"{call.lane}: {call.method}, {1000 * (call.end - call.start):.1f} ms"
            )

    for start, end, number in pools_at_work(calls):
        if number > 1:
            axes.barh(
                len(shown) + 0.2, end - start, left=start - origin, height=0.5, color=OVERLAP_COLOUR
            )
    for row in range(1, len(shown) + 1):
        if row == len(shown) or shown[row - 1][0] != shown[row][0]:
            axes.axhline(row - 0.5, color="#888888", linewidth=0.8)
    for cut in cuts:
        axes.axvline(cut - origin, color="#888888", linewidth=1.0, linestyle=":")

    labels = [*(f"{pool}  {lane}" for pool, lane in shown), "2 pools or more at work"]
    axes.set_yticks([*range(len(shown)), len(shown) + 0.2], labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds")
    colour_legend(axes, {c.method: METHOD_COLOURS.get(c.method, OTHER_COLOUR) for c in calls})
    return as_svg(figure, "Timeline of the last steps, a lane for each pool, role and rank", titles)


@styled
def shares(rows: Sequence[tuple[str, float, float]]) -> str:
    """Phase shares as one bar of 100 per cent."""
    figure = new_figure(9.5, 1.3)
    axes = figure.add_subplot()
    left = 0.0
    for (_, _, share), colour in zip(rows, COLOURS, strict=False):
        axes.barh(0, share, left=left, height=0.6, color=colour)
        left += share
    axes.set_xlim(0, 100)
    axes.set_yticks([])
    axes.set_xlabel("per cent of a step")
    colour_legend(
        axes, {f"{n} {share:.1f} %": c for (n, _, share), c in zip(rows, COLOURS, strict=False)}
    )
    return as_svg(
        figure,
        "Shares of a step's time: " + ", ".join(f"{n} {share:.1f} %" for n, _, share in rows),
    )


def colour_legend(axes: Any, colour_of: Mapping[str, str]) -> None:
    """Names and their colours above the axes."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in colour_of.items()]
    axes.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.3
    )


def new_figure(width: float, height: float, margins: Mapping[str, float] | None = None) -> Figure:
    """An empty figure; given `margins` need not be found, which takes twice as long as drawing."""
    from matplotlib.figure import Figure

    if margins is None:
        return Figure(figsize=(width, height), layout="constrained")
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(**margins)
    return figure


def running_mean(
    steps: Sequence[float], values: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The mean over a window around each step; narrower at the ends. nan and inf do not count."""
    import numpy as np

    finite = np.isfinite(values)
    half = len(values) // (2 * WINDOWS)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    begin, end = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    number = counts[end] - counts[begin]
    means = np.where(number > 0, (sums[end] - sums[begin]) / np.maximum(number, 1), np.nan)
    return list(steps), means.tolist()


def _thin(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `MOST_POINTS` points: more cannot be told apart on a screen."""
    points = spread(list(zip(steps, values, strict=True)), MOST_POINTS)
    return [step for step, _ in points], [value for _, value in points]


def as_svg(figure: Figure, description: str, titles: Mapping[str, str] | None = None) -> str:
    """The figure as an `svg` element with a description.

    `titles` are shown on hovering over the groups they name.
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
