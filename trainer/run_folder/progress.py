"""A run on the console: a live bar on a terminal, a line a step where there is none.

`trainer.run_folder.tracking` makes it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TextIO

BOOKKEEPING = ("timing", "perf/", "val-", "training/")
"""How the names of numbers begin that do not say what a step learned."""
MOST_NUMBERS = 3
Headline = Callable[[Mapping[str, float]], Sequence[str]]
"""The few numbers of a step that a person watches, in words; empty where the recipe has none."""
BAR_FORMAT = "{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"
"""Short beside the bar, so that the first number is seen on a terminal of 40 columns, too."""


def no_headline(metrics: Mapping[str, float]) -> Sequence[str]:
    """Of a recipe whose first numbers are shown."""
    return ()


class Console:
    """Shows what the recipe's `headline` picks of a step, and the time left."""

    def __init__(
        self,
        total_steps: int,
        headline: Headline = no_headline,
        stream: TextIO | None = None,
    ):
        self._total, self._stream = total_steps, stream or sys.stdout
        self._headline = headline
        self._bar: Any = None
        self._began = time.monotonic()
        self._first_step: int | None = None
        self._live = self._stream.isatty()

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        if self._first_step is None:
            self._first_step = step
        text = "  ".join(self._headline(metrics) or first_numbers(metrics))
        validated = [name for name in metrics if name.startswith("val-core/")]
        scores = [f"{name} {metrics[name]:.4g}" for name in validated]
        if self._live:
            self._move_bar(step, text, scores)
            return
        left = f"  {self._time_left(step)} left" if step > self._first_step else ""
        print(
            f"step {step}/{self._total}  {text or 'validation'}{left}",
            file=self._stream,
            flush=True,
        )
        for line in scores:
            print(f"    {line}", file=self._stream, flush=True)

    def _move_bar(self, step: int, text: str, scores: list[str]) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                total=self._total,
                initial=max(step - 1, 0),  # a run may begin with a validation, as step 0
                file=self._stream,
                dynamic_ncols=True,
                bar_format=BAR_FORMAT,
            )
        for line in scores:
            self._bar.write(f"step {step}  {line}", file=self._stream)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)

    def _time_left(self, step: int) -> timedelta:
        assert self._first_step is not None, "set by the first write"
        num_timed = step - self._first_step
        return timedelta(
            seconds=round((time.monotonic() - self._began) / (num_timed + 1) * (self._total - step))
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def first_numbers(metrics: Mapping[str, float]) -> list[str]:
    """A step's first numbers, of a recipe that says nothing of them."""
    own = [name for name in metrics if not name.startswith(BOOKKEEPING)]
    return [f"{name} {metrics[name]:.4g}" for name in own[:MOST_NUMBERS]]
