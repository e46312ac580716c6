"""The process that runs reward functions: `python -m trainer.reward_process FD FUNCTION`; `trainer.reward` starts it.

Reads lists of samples from the pipe at file descriptor FD and answers each sample at once, so that the driver knows
which one hangs. FUNCTION is a dotted path. Imports nothing heavy: it starts again after every sample that hangs.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Outcome = tuple[float | None, dict[str, float], str | None]
"""Score (None: failed), other numbers that the function returned, what went wrong."""


def score_sample(function: Callable[..., Any], sample: tuple[Any, ...]) -> Outcome:
    """One sample's outcome; never raises."""
    try:
        result = function(*sample)
        extras = dict(result) if isinstance(result, dict) else {"score": result}
        score = float(extras.pop("score"))
        if isinstance(result, str) or not math.isfinite(score):
            raise ValueError(f"the reward function returned {result!r}")
        return score, {str(k): float(v) for k, v in extras.items() if isinstance(v, int | float)}, None
    except Exception as err:  # noqa: BLE001 - the process edge: a user's function may raise anything
        return None, {}, f"{type(err).__name__}: {err}"


def serve(pipe: Connection, dotted_path: str) -> None:
    """Answer until the other end closes."""
    module, _, name = dotted_path.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    pipe.send("ready")
    while True:
        try:
            samples = pipe.recv()
        except EOFError:
            return
        for sample in samples:
            pipe.send(score_sample(function, sample))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2])
