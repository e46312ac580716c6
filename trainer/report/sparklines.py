"""A run's curves as lines of text, printed at its end.

reward  0.301 ▁▁▂▃▅▆▇█ 0.752
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from trainer.report.read import Metrics, series

WATCHED = {
    "reward": ("critic/score/mean",),
    "length": ("response_length/mean",),
    "KL": ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"),
    "loss": ("train/loss",),
    "accuracy": ("train/accuracy", "train/rewards/accuracy"),
    "val loss": ("val/loss", "val-core/rm/loss"),
}
"""Name of a line -> metrics, of which the first existing one is drawn; a KL of only 0 is
skipped."""
MOST_LINES = 4
PIPE_WIDTH, MOST_COLUMNS = 80, 60
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"


def sparklines(metrics: Metrics, width: int | None) -> list[str]:
    """Return at most four lines, no wider than `width` columns; None means no terminal."""
    drawn = []
    for name, wanted in WATCHED.items():
        candidates = filter(None, (series(metrics, metric)[1] for metric in wanted))
        values = next(filter(any, candidates) if name == "KL" else candidates, [])
        if len(values) > 1:
            drawn.append((name, f"{values[0]:.3g}", values, f"{values[-1]:.3g}"))
    if not drawn:
        return []

    drawn = drawn[:MOST_LINES]
    before = max(len(name) for name, *_ in drawn), max(len(first) for _, first, *_ in drawn)
    after = max(len(last) for *_, last in drawn)
    room = (width or PIPE_WIDTH) - sum(before) - after - 4
    blocks = BLOCKS if _can_print(BLOCKS) else ASCII_BLOCKS
    return [
        f"{name:<{before[0]}}  {first:>{before[1]}} {curve(values, room, blocks)} {last}"
        for name, first, values, last in drawn
    ]


def curve(values: Sequence[float], room: int, blocks: str = BLOCKS) -> str:
    """Return a character per column for the mean of its values; a blank without finite values."""
    columns = max(min(len(values), room, MOST_COLUMNS), 1)
    means = []
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        finite = [value for value in part if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)

    low = min((mean for mean in means if not math.isnan(mean)), default=0.0)
    high = max((mean for mean in means if not math.isnan(mean)), default=0.0)
    scale = (len(blocks) - 1) / ((high - low) or 1.0)
    return "".join(
        " " if math.isnan(mean) else blocks[round((mean - low) * scale)] for mean in means
    )


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
