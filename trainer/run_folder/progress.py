"""A run on the console: a live bar on a terminal, a line a step where there is none.

`trainer.run_folder.tracking` makes it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TextIO

KL_NAMES = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")
"""The KL that is shown: to the reference, else to the policy before the update."""
WATCHED = {
    "actor/entropy": "entropy",
    "response_length/mean": "length",
    "actor/pg_loss": "loss",
}
"""Further numbers of a step -> what they are called on the console."""
BOOKKEEPING = ("timing", "perf/", "val-", "training/")
"""How the names of numbers begin that do not say what a step learned."""
MOST_NUMBERS = 3
BAR_FORMAT = "{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"
"""Short beside the bar, so that the reward is seen on a terminal of 40 columns, too."""


class Console:
    """Shows what `headline` picks of a step, and the time left."""

    def __init__(self, total_steps: int, stream: TextIO | None = None):
        """`stream` is where it shows; None takes standard output."""
        self._total, self._stream = total_steps, stream or sys.stdout
        self._bar: Any = None
        self._began = time.monotonic()
        self._first_step: int | None = None
        self._live = self._stream.isatty()

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """One step."""
        if self._first_step is None:
            self._first_step = step
        text = "  ".join(headline(metrics))
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
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def headline(metrics: Mapping[str, float]) -> Iterator[str]:
    """The few numbers of a step that a person watches: how it learns, and how fast.

    Those of PPO, as far as there are any. A recipe that has none of them is shown by its first
    numbers.
    """
    known = list(_known(metrics))
    if known:
        yield from known
        return
    own = [name for name in metrics if not name.startswith(BOOKKEEPING)]
    for name in own[:MOST_NUMBERS]:
        yield f"{name} {metrics[name]:.4g}"


def _known(metrics: Mapping[str, float]) -> Iterator[str]:
    if "critic/score/mean" in metrics:
        yield f"reward {metrics['critic/score/mean']:.4g}"

    kl = next((metrics[name] for name in KL_NAMES if metrics.get(name)), None)
    if kl is not None:  # one that is 0 is of a policy held against itself
        yield f"KL {kl:.3g}"

    for name, shown in WATCHED.items():
        if name in metrics:
            yield f"{shown} {metrics[name]:.3g}"

    if metrics.get("perf/time_per_step", 0.0) > 0:
        yield f"{metrics['perf/total_num_tokens'] / metrics['perf/time_per_step']:.0f} tokens/s"
