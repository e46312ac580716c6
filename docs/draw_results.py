"""Draw curves of runs that pages tell of, from docs/data/results.json, with a band for seeds.

    python docs/draw_results.py                                draw all pictures again
    python docs/draw_results.py PICTURE METRIC NAME=RUN,...    store the metric of runs, and draw

The curve NAME is the mean over its runs; the band reaches from the lowest run to the highest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
DATA = DOCS / "data" / "results.json"
COLORS = ("#3d85d9", "#d98a3d", "#5aa66a")
LABELS = {
    "carries": "accuracy on 1,000 new sums",
    "smollm2": "right objects of 200 new ones",
}
"""Picture -> the label of its vertical axis; "reward" for other pictures."""


def values(run: Path, metric: str) -> dict[int, float]:
    """Return the metric of a run by step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {int(row["step"]): round(row[metric], 4) for row in rows if metric in row}


def store(picture: str, metric: str, named: list[str]) -> None:
    """Write the metric of the runs into docs/data."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    curves: dict[str, dict[str, list[float]]] = {}
    for name, runs in (argument.split("=", 1) for argument in named):
        seeds = [values(Path(run), metric) for run in runs.split(",")]
        steps = set.intersection(*(set(seed) for seed in seeds))
        curves[name] = {str(step): [seed[step] for seed in seeds] for step in sorted(steps)}
    data[picture] = {"metric": metric, "curves": curves}
    lines = [f'  "{name}": {json.dumps(data[name])}' for name in sorted(data)]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def draw(picture: str) -> None:
    """Draw a line and a band for each curve of a picture."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    data = json.loads(DATA.read_text(encoding="utf-8"))[picture]
    gray = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings = {"svg.fonttype": "none", "svg.hashsalt": picture}
    with rc_context(settings | dict.fromkeys(gray, "#808080")):
        figure = Figure(figsize=(6.4, 2.6), layout="constrained")
        axes = figure.subplots()
        for (name, curve), color in zip(data["curves"].items(), COLORS, strict=False):
            steps = [int(step) for step in curve]
            means = [sum(seeds) / len(seeds) for seeds in curve.values()]
            lowest, highest = map(min, curve.values()), map(max, curve.values())
            axes.plot(steps, means, color=color, label=name)
            axes.fill_between(steps, [*lowest], [*highest], color=color, alpha=0.25, linewidth=0)
        axes.set_xlabel("step")
        axes.set_ylabel(LABELS.get(picture, "reward"))
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        file = DOCS / "images" / f"{picture}.svg"
        figure.savefig(file, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:]:
        store(sys.argv[1], sys.argv[2], sys.argv[3:])
    for name in json.loads(DATA.read_text(encoding="utf-8")):
        draw(name)
