"""usage: verl-like replay RUN --step K [--stage score|estimate|update] [--break]
           [--with KEY=VALUE] [--without SAMPLE] [--blame [METRIC]]
           [--from-start] [--backend local|run]

Repeats step K of the run folder RUN in a temporary folder, from the newest
checkpoint before it: same samples, same numbers. RUN is only read.

  verl-like replay runs/verl_like/ppo --step 7
  verl-like replay runs/verl_like/ppo --step 7 --stage update --break

It prints the metrics (except times, speed and memory) and the saved batches
that differ in any bit, at most 20; the exit code is then 1. Runs of
`verl-like async` are rejected, because they depend on timing.

  --stage update     only that stage, with its input that
                     trainer.batch_steps_to_keep saved in RUN; otherwise the
                     earlier stages recompute it
  --with KEY=VALUE   change a setting, and print which numbers it changes, as in
                     --with actor_rollout_ref.actor.optim.lr=3e-6; repeatable
  --without SAMPLE   leave a sample out: UID/INDEX, or UID for all samples of a
                     prompt; the advantages of the others are estimated without
                     it; repeatable
  --blame [METRIC]   order the samples by their effect on a metric of the
                     samples or the loss; by default on actor/grad_norm, after
                     samples that make most of the score or of the gap between
                     the log-probs of trainer and sampler
  --break            open the debugger right before; roles of one process run
                     in this process, so breakpoint() also works in their code
  --from-start       if no earlier checkpoint exists: repeat all K steps from
                     the beginning
  --backend run      use the run's backend; local (the default) needs no cluster
                     and has the same number of processes
"""

from __future__ import annotations

import argparse
import logging
import sys
from bdb import BdbQuit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.observers.saved_batches import STAGES
from trainer.tools.replay.replay import Replayed, replay
from trainer.tools.replay.what_if import Blame
from verl_like.errors import ConfigError
from verl_like.terminal import print_or_exit, usage_text

MAX_LINES = 20
"""The most differences that are printed."""
MAX_BLAMED, MAX_TEXT = 10, 60
"""The most samples that are printed, and characters of a response."""


def main(arguments: Sequence[str]) -> None:
    """Replay; exit with 1 if anything differs."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    parser = argparse.ArgumentParser("verl-like replay", usage_text(__doc__))
    add = parser.add_argument
    add("run", metavar="RUN")
    add("--step", type=int)
    add("--with", dest="changes", action="append", default=[])
    add("--without", action="append", default=[])
    add("--blame", nargs="?", const="")
    add("--stage", choices=STAGES, default="")
    add("--break", dest="breaks", action="store_true")
    add("--from-start", action="store_true")
    add("--backend", choices=("local", "run"), default="local")
    options = parser.parse_args(arguments)
    if options.step is None:
        parser.error("give --step K; it also repeats the trajectories of the step's environments")
    if options.without and options.stage in ("score", "update"):
        parser.error("--without changes estimate and update: leave --stage out")
    blame = None if options.blame is None else Blame(options.blame)
    try:
        result = replay(
            Path(options.run),
            options.step,
            options.stage,
            breaks=options.breaks,
            from_start=options.from_start,
            backend=options.backend,
            changes=settings_of(options.changes),
            without=options.without,
            blame=blame,
        )
    except BdbQuit:
        sys.exit("left from the debugger: nothing was compared")
    lines = [*blame_lines(blame, options.step), *result.what_if]
    print_or_exit("\n".join([*lines, verdict(result, options.step, options.stage)]))
    if result.differences:
        sys.exit(1)


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """Return settings that were written as KEY=VALUE."""
    pairs = [text.partition("=") for text in texts]
    wrong = [key for key, equals, _ in pairs if not equals]
    if wrong:
        raise ConfigError(f"--with {wrong[0]}: write KEY=VALUE, as in --with trainer.seed=2.")
    return {key: OmegaConf.create(f"value: {value}").value for key, _, value in pairs}


def blame_lines(blame: Blame | None, step: int) -> list[str]:
    """Return the samples with the largest effects."""
    if blame is None:
        return []
    if not blame.effects:
        raise ConfigError(f"--blame {blame.name}: step {step} has no update of that model.")
    lines = [f"{blame.name} of step {step} is {blame.total:.6g}; without a sample it changes by"]
    for effect in blame.effects[:MAX_BLAMED]:
        most_of = f"most of {effect.most_of}, " if effect.most_of else ""
        lines.append(
            f"  {-effect.effect:+.4g}  {effect.name}: {most_of}score {effect.score:.4g}, "
            f"{effect.num_tokens} tokens, {effect.text[:MAX_TEXT]!r}"
        )
    return lines


def verdict(result: Replayed, step: int, stage: str) -> str:
    """Describe what was compared, and what differs."""
    subject = f"{stage} of step {step}" if stage else f"step {step}"
    compared = f"{result.num_metrics} metrics"
    if result.compared_batches:
        compared += f" and the batches of {', '.join(result.compared_batches)}"
    if not result.differences:
        return f"{subject}: all {compared} are identical bit for bit"

    lines = [f"{subject}: of {compared}, {len(result.differences)} differ"]
    lines += [f"  {line}" for line in result.differences[:MAX_LINES]]
    num_hidden = len(result.differences) - MAX_LINES
    if num_hidden > 0:
        lines.append(f"  and {num_hidden} more")
    return "\n".join(lines)
