"""The console of a run in a notebook: one output, which is refreshed to show the last step.

IPython is imported only in a notebook, whose kernel has imported it already.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from html import escape
from typing import Any

REFRESH_S = 0.25
"""The shortest time between two refreshes, in seconds."""
NUMBER = re.compile(r"(?<!\S)(?:[-+]?\d[\d.]*(?:e[-+]?\d+)?|[-+]?inf|nan)(?!\S)")
WIDTH, HEIGHT, MOST_POINTS = 240, 28, 240


def is_in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookConsole:
    """A bar of steps, and a row for each number: its name, its curve, its last value.

    `numbers_of` returns the numbers of a step in words, such as "reward 0.5".
    """

    def __init__(
        self, total_steps: int, numbers_of: Callable[[Mapping[str, float]], Sequence[str]]
    ) -> None:
        self._total, self._numbers_of = total_steps, numbers_of
        self._curves: dict[str, list[float]] = {}
        self._last: dict[str, str] = {}
        self._step = 0
        self._first_step: int | None = None
        self._began = time.monotonic()
        self._shown_at = 0.0
        self._handle: Any = None

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Show the numbers of a step, unless the last refresh was too recent."""
        self._step = step
        self._first_step = step if self._first_step is None else self._first_step
        for text in self._numbers_of(metrics):
            value = NUMBER.search(text)
            if value is not None:
                name = " ".join(text.replace(value[0], "", 1).split())
                self._curves.setdefault(name, []).append(float(value[0]))
                self._last[name] = value[0]
        if time.monotonic() - self._shown_at >= REFRESH_S:
            self._show()

    def close(self) -> None:
        """Show the last step."""
        if self._handle is not None:
            self._show()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        if self._handle is None:
            from IPython.display import display

            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        numbers = (f"{name} {value}" for name, value in self._last.items())
        return "  ".join([f"step {self._step}/{self._total}", *numbers])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{_curve(values)}</td><td>{self._last[name]}</td></tr>"
            for name, values in self._curves.items()
        )
        bar = f'<progress value="{self._step}" max="{self._total}"></progress>'
        return (
            f"<div>{bar} step {self._step}/{self._total}{self._left()}<table>{rows}</table></div>"
        )

    def _left(self) -> str:
        """Return the estimated remaining time, from the steps so far."""
        num_steps = self._step - (self._first_step or 0)
        if not num_steps or self._step >= self._total:
            return ""
        seconds = (self._shown_at - self._began) / (num_steps + 1)
        return f", {timedelta(seconds=round(seconds * (self._total - self._step)))} left"


def _curve(values: Sequence[float]) -> str:
    """Return a line of the values as SVG, in the text's color; non-finite values are left out."""
    every = len(values) // MOST_POINTS + 1
    points = [(at, value) for at, value in enumerate(values) if math.isfinite(value)][::every]
    low, high = min((v for _, v in points), default=0.0), max((v for _, v in points), default=0.0)
    across, up = WIDTH / max(len(values) - 1, 1), (HEIGHT - 4) / ((high - low) or 1.0)
    line = " ".join(f"{at * across:.1f},{HEIGHT - 2 - (v - low) * up:.1f}" for at, v in points)
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}"><polyline points="{line}" fill="none" '
        'stroke="currentColor" stroke-width="1.5"/></svg>'
    )
