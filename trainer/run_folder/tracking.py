"""The destinations of a step's metrics. A run opens one `Tracking`:

    with make_tracking(config, total_steps, headline) as tracking:
        tracking.log({"train/loss": 0.5}, step=1)

A tracker is a class with `write(metrics, step)` and `close()`. If it also has `write_samples(name,
rows, step)`, it gets tables of samples. `trainer.logger` names built-in trackers, those registered
in `TRACKERS`, and others by their dotted path.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TextIO

from trainer.config.schema import TRACKERS, RunConfig, check_tracker_methods
from trainer.run_folder.metrics import evenly_spaced
from verl_like.files import json_line, json_objects

logger = logging.getLogger(__name__)
BOOKKEEPING = ("timing", "perf/", "val-", "training/")
"""Prefixes of metrics that do not show whether the model learns."""
MAX_NUMBERS = 3
LINE_EVERY_S = 1.0
"""Shortest time between two lines of the console, except for lines that are always printed."""
MAX_SAMPLES = 16
"""Maximum number of rows of a table of samples."""
BAR_FORMAT = "{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"
"""Format of the bar, so short that the first number is visible on a terminal of 40 columns."""
BUILT_IN = ("console", "tensorboard", "trackio", "wandb")
"""The trackers that need not be registered; all but the console are in `trackers`."""
Headline = Callable[[Mapping[str, float]], Sequence[str]]
"""Returns a step's numbers for the console, in words; empty if the recipe has none."""


class Tracker(Protocol):
    """Interface of a metrics backend; a method `write_samples(name, rows, step)` is optional.

    A run creates each tracker that `trainer.logger` names by `tracker_class(config, total_steps)`.

    Example:

        class PrintTracker:
            def __init__(self, config, total_steps): ...
            def write(self, metrics, step): print(step, metrics["critic/score/mean"])
            def close(self): ...
    """

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of one step."""

    def close(self) -> None:
        """Called after the last step, or after a step that failed."""


class JsonLines:
    """`metrics.jsonl`: a line per step, which the file has when `write` returns.

    Numbers have full precision; times are rounded to microseconds.
    """

    def __init__(self, folder: str | Path):
        """Continue the file in `folder`, or create both."""
        self._path = Path(folder) / "metrics.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a line to the file of that name, which a resume may have replaced."""
        numbers = {  # more digits of a time are noise
            name: round(value, 6) if name.startswith("timing_") else value
            for name, value in metrics.items()
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_line({"step": step, **numbers}))


class Console:
    """A live bar on a terminal or in a notebook; otherwise lines, at most one per second.

    The first step, the last step, and every validation always have lines. A line shows the recipe's
    `headline` of a step, or its first metrics, and the time left.
    """

    def __init__(self, total_steps: int, headline: Headline, stream: TextIO | None = None):
        self._total, self._stream = total_steps, stream or sys.stdout
        self._headline, self._has_bar = headline, self._stream.isatty() or is_in_notebook()
        self._bar: Any = None
        self._began = time.monotonic()
        self._first_step: int | None = None
        self._printed = -math.inf
        self.ends_early = False
        """True if the next step is the last one, so that no time is left."""
        self._waiting: list[str] = []
        """The lines of the last step that are not printed yet."""

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Show a step's metrics in the progress bar, or print them on a line.

        Lines of steps without scores are printed at most every `LINE_EVERY_S` seconds.
        """
        numbers, scores = numbers_of(metrics, self._headline), scores_of(metrics)
        text = "  ".join(numbers)
        if self._has_bar:
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
            return
        is_last, left = self.ends_early or step == self._total, ""
        if self._first_step is None:
            self._first_step = step
        elif not is_last:
            seconds = (time.monotonic() - self._began) / (step - self._first_step + 1)
            left = f"  {timedelta(seconds=round(seconds * (self._total - step)))} left"
        self._waiting = [f"step {step}/{self._total}  {text or 'validation'}{left}"]
        self._waiting += [f"    {score}" for score in scores]
        is_due = time.monotonic() - self._printed >= LINE_EVERY_S
        if is_due or scores or is_last or step == 1:
            self._print()

    def _print(self) -> None:
        print(*self._waiting, sep="\n", file=self._stream, flush=True)
        self._printed, self._waiting = time.monotonic(), []

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._waiting:
            self._print()


def is_in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def numbers_of(metrics: Mapping[str, float], headline: Headline) -> Sequence[str]:
    """Return a step's headline metrics as text, such as "reward 0.5"."""
    names = [name for name in metrics if not name.startswith(BOOKKEEPING)][:MAX_NUMBERS]
    return headline(metrics) or [f"{name} {metrics[name]:.4g}" for name in names]


def scores_of(metrics: Mapping[str, float]) -> list[str]:
    """Return the scores of a validation as text."""
    return [f"{name} {metrics[name]:.4g}" for name in metrics if name.startswith("val-core/")]


@dataclass(frozen=True)
class Tracking:
    """Writes a step's metrics to every tracker, and tables of samples to trackers that take them.

    Tables are written for each validation, and for the rollouts of steps 1, 2, 4, 8, ... and the
    last.
    """

    trackers: Sequence[Any]
    folder: Path
    total_steps: int

    def log(self, metrics: Mapping[str, Any], step: int, is_last: bool = False) -> None:
        """Write the metrics of a step; the run may end with it before its last step."""
        plain = {name: float(value) for name, value in metrics.items()}
        for tracker in self.trackers:
            if is_last and isinstance(tracker, Console):
                tracker.ends_early = True
            tracker.write(plain, step)

        takers = [tracker for tracker in self.trackers if hasattr(tracker, "write_samples")]
        if not takers:
            return
        shows_rollouts = step & (step - 1) == 0 or is_last or step == self.total_steps
        for name in ("validation", "rollouts") if shows_rollouts else ("validation",):
            rows, _ = json_objects(self.folder / name / f"{step}.jsonl")
            # the best, the worst and some others
            some = evenly_spaced(sorted(rows, key=lambda row: -float(row["score"])), MAX_SAMPLES)
            if some:
                for tracker in takers:
                    tracker.write_samples(name, some, step)


@contextmanager
def make_tracking(
    config: RunConfig, total_steps: int, headline: Headline = lambda metrics: ()
) -> Iterator[Tracking]:
    """Open metrics.jsonl and the trackers of `trainer.logger`; the console shows the `headline`.

    Metrics of roles with the user's workers (`ROLE/NAME`) follow the headline. A tracker
    that is not installed is left out with a warning.
    """
    workers = config.role_workers
    of_own_roles = tuple(f"{r}/" for r in workers if not workers[r].startswith("workers."))

    def console_headline(metrics: Mapping[str, float]) -> Sequence[str]:
        names = [name for name in metrics if name.startswith(of_own_roles)][:MAX_NUMBERS]
        words = headline(metrics)
        return [*words, *(f"{name} {metrics[name]:.4g}" for name in names)] if words else ()

    trackers: list[Any] = [JsonLines(config.trainer.default_local_dir)]
    with ExitStack() as at_end:
        for name in dict.fromkeys(config.trainer.logger):
            try:
                if name == "console":
                    tracker: Tracker = Console(
                        total_steps, console_headline, sys.stderr if is_in_notebook() else None
                    )
                elif name in BUILT_IN:
                    from trainer.run_folder.trackers import START

                    tracker = START[name](config, total_steps)
                else:
                    tracker = TRACKERS.look_up(name)(config, total_steps)
                check_tracker_methods(tracker, f"what trainer.logger={name} makes")
            except ImportError as err:
                remedy = f"Install it with: pip install 'verl-like[{name}]'"
                if name not in BUILT_IN:
                    remedy = "Install the package that it imports."
                logger.warning(
                    "trainer.logger includes %s, which is not installed (%s). The run continues "
                    "without it. %s",
                    *(name, err, remedy),
                )
                continue
            at_end.callback(tracker.close)
            trackers.append(tracker)
        yield Tracking(trackers, Path(config.trainer.default_local_dir), total_steps)
