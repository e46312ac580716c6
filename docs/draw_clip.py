"""Draw the loss of a token by its ratio, by the code's own loss: `python docs/draw_clip.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from workers.losses.registry import POLICY_LOSSES

PICTURE = Path(__file__).resolve().parent / "images" / "clip.svg"
LINES = {"good token, A = 1": (1.0, "#3d85d9"), "bad token, A = -1": (-1.0, "#d55e00")}


def losses(advantage: float) -> tuple[list[float], list[float]]:
    """Return ratios from 0.5 to 1.6 and the token's loss at each."""
    ratios = torch.linspace(0.5, 1.6, 111)
    token = torch.ones(1, 1)
    loss = POLICY_LOSSES["vanilla"]
    return ratios.tolist(), [
        float(loss(0 * token, ratio.log() * token, advantage * token, token, "token-mean")[0])
        for ratio in ratios
    ]


def main() -> None:
    """Write the picture; gray text can be read on a light and on a dark page."""
    gray = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "clip"}
    with rc_context(settings | dict.fromkeys(gray, "#808080")):
        figure = Figure(figsize=(6, 2.8), layout="constrained")
        axes = figure.add_subplot()
        for name, (advantage, color) in LINES.items():
            axes.plot(*losses(advantage), color=color, label=name)
        for ratio in (0.8, 1.2):
            axes.axvline(ratio, color="#808080", linewidth=0.8, linestyle=":")
        axes.set_xlabel("ratio r")
        axes.set_ylabel("loss")
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
