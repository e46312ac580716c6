"""Draw docs/images/carries.svg: the accuracy of runs of examples/carries, with a band for seeds.

    python docs/draw_carries.py GRPO=RUN,RUN,... PPO=RUN,RUN,...    store their numbers, and draw
    python docs/draw_carries.py                                     draw docs/data/carries.json

The line is the mean over the seeds; the band reaches from the lowest seed to the highest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
DATA = DOCS / "data" / "carries.json"
PICTURE = DOCS / "images" / "carries.svg"
ACCURACY = "val-core/prompts/acc/mean@1"
COLORS = ("#3d85d9", "#d98a3d")


def accuracies(run: Path) -> dict[int, float]:
    """Return the accuracy of each validation of a run, by step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {int(row["step"]): row[ACCURACY] for row in rows if ACCURACY in row}


def store(named: list[str]) -> None:
    """Write the accuracies of the runs into docs/data."""
    data: dict[str, dict[str, list[float]]] = {}
    for name, runs in (argument.split("=", 1) for argument in named):
        seeds = [accuracies(Path(run)) for run in runs.split(",")]
        data[name] = {str(step): [seed[step] for seed in seeds] for step in seeds[0]}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def draw() -> None:
    """Draw a line and a band for each algorithm."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    data = json.loads(DATA.read_text(encoding="utf-8"))
    gray = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "carries"}
    with rc_context(settings | dict.fromkeys(gray, "#808080")):
        figure = Figure(figsize=(6.4, 2.8), layout="constrained")
        axes = figure.subplots()
        for (name, curve), color in zip(data.items(), COLORS, strict=False):
            steps = [int(step) for step in curve]
            means = [sum(seeds) / len(seeds) for seeds in curve.values()]
            lowest, highest = map(min, curve.values()), map(max, curve.values())
            axes.plot(steps, means, color=color, label=name)
            axes.fill_between(steps, [*lowest], [*highest], color=color, alpha=0.25, linewidth=0)
        axes.set_xlabel("step")
        axes.set_ylabel("accuracy on 1,000 new sums")
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:]:
        store(sys.argv[1:])
    draw()
