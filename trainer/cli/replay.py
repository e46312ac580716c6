"""`verl-like replay RUN --step K`: a step or a stage of a run, made again and compared."""

from __future__ import annotations

import argparse
import logging
import sys
from bdb import BdbQuit
from collections.abc import Sequence
from pathlib import Path

from trainer.replay.replay import Replayed, replay
from trainer.run_folder.batches import STAGES

MOST_LINES = 20
"""Differences that are printed."""


def main(arguments: Sequence[str]) -> None:
    """Make it again; exit code 1 where anything differs."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    options = _parser().parse_args(arguments)
    try:
        found = replay(
            Path(options.run),
            options.step,
            options.stage,
            breaks=options.breaks,
            from_start=options.from_start,
            backend=options.backend,
        )
    except BdbQuit:
        sys.exit("left from the debugger: nothing was compared")
    print(verdict(found, options.step, options.stage), flush=True)
    if found.differences:
        sys.exit(1)


def verdict(found: Replayed, step: int, stage: str) -> str:
    """What was compared, and what was not as it had been."""
    what = f"{stage} of step {step}" if stage else f"step {step}"
    compared = f"{found.num_metrics} numbers"
    if found.kept_batches:
        compared += f" and the batches of {', '.join(found.kept_batches)}"
    if not found.differences:
        return f"{what}: {compared} are as they were, bit for bit"

    lines = [f"{what}: of {compared}, {len(found.differences)} differ"]
    lines += [f"  {line}" for line in found.differences[:MOST_LINES]]
    more = len(found.differences) - MOST_LINES
    if more > 0:
        lines.append(f"  and {more} more")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("verl-like replay", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder")
    add("--step", type=int, required=True, help="the step to make again")
    add("--stage", choices=STAGES, default="", help="that stage alone")
    add("--break", dest="breaks", action="store_true", help="enter the debugger right before")
    add("--from-start", action="store_true", help="without a checkpoint, from the beginning")
    add("--backend", choices=("local", "run"), default="local", help="run: the run's own")
    return parser
