"""usage: verl-like bench overlap RUN_DIR
       verl-like bench overlap --gen 1.2 --score 0.3 --update 0.8 --sync 0.1
           [--makers 1,2] [--trainers 1] [--staleness 0,1,4] [--json] ...

Predicts a detached run, whose makers generate while its trainer trains, from the seconds that the
phases took in a run, or from those given: seconds a step, speed-up over the synchronous run, who
is idle, what limits, for fewer and more makers. A simulation: nothing is started.

  --pieces 4          of a batch, each made by one maker; by default as many as makers
  --limit 8           pieces that may be queued or in the making at once
  --at-once           makers take new weights in the middle of a piece
  --fixed-share 0.5   of generation, that fewer rows do not shorten: the longest response's
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.detached.overlap import (
    Phases,
    Prediction,
    Setup,
    measured_phases,
    simulate,
    what_limits,
)
from verl_like.errors import ConfigError
from verl_like.terminal import draw_table, fit, terminal_width

RATIOS = ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
"""(makers, trainers) of the sweep."""
PHASES = ("gen", "score", "update", "sync")
WORTH_IT = 1.05
"""Speed-up below which asynchrony is not advised, and within which two runs are alike."""


@dataclass(frozen=True)
class Row:
    """One predicted run."""

    name: str
    setup: Setup
    prediction: Prediction
    speed_up: float
    """Over the synchronous run of as many makers and trainers."""
    limit: str

    def as_json(self) -> dict[str, Any]:
        """Its numbers."""
        return {
            "run": self.name,
            **asdict(self.setup),
            "seconds_a_step": self.prediction.seconds,
            "speed_up": self.speed_up,
            "limit": self.limit,
            "shares": self.prediction.shares,
            "staleness": dict(self.prediction.staleness),
        }


def main(arguments: Sequence[str]) -> None:
    """The one benchmark that there is."""
    if arguments[:1] != ["overlap"]:
        sys.exit(__doc__)
    overlap(arguments[1:])


def overlap(arguments: Sequence[str]) -> None:
    """Print the predictions, as tables or as JSON."""
    options = _parser().parse_args(arguments)
    phases, notes = _phases(options)
    setups = _setups(options)
    rows = [row for setup in setups for row in predict(phases, setup, options.staleness)]
    ratios = sweep(phases, replace(setups[0], max_staleness=max(options.staleness)))
    advice = advise(phases, rows)

    if options.json:
        found = {
            "phases": asdict(phases),
            "notes": notes,
            "runs": [row.as_json() for row in rows],
            "ratios": [row.as_json() for row in ratios],
            "advice": advice,
        }
        print(json.dumps(found))
        return
    width = terminal_width()
    lines = [
        *(fit(f"{note[0].upper()}{note[1:]}.", width) for note in notes),
        _phase_line(phases),
        "",
        *draw_table(_table(rows), width, num_titles=3, flush_right=True),
        "",
        f"Makers to trainers, at staleness {ratios[0].setup.max_staleness}:",
        *draw_table(_table(ratios), width, num_titles=3, flush_right=True),
        "",
        fit(advice, width),
    ]
    print("\n".join(lines), flush=True)


def predict(phases: Phases, setup: Setup, staleness: Sequence[int]) -> list[Row]:
    """The synchronous run, and those of each staleness above 0."""
    base = replace(setup, max_staleness=0)
    synchronous = simulate(phases, base)
    rows = [Row("synchronous", base, synchronous, 1.0, what_limits(phases, base))]
    for bound in sorted({bound for bound in staleness if bound > 0}):
        bounded = replace(setup, max_staleness=bound)
        rows.append(_row(f"staleness {bound}", phases, bounded, synchronous.seconds))
    return rows


def sweep(phases: Phases, setup: Setup) -> list[Row]:
    """Fewer and more makers for each trainer: what is idle goes from the one to the other."""
    rows = []
    for makers, trainers in RATIOS:
        ratio = replace(setup, num_makers=makers, num_trainers=trainers)
        synchronous = simulate(phases, replace(ratio, max_staleness=0)).seconds
        rows.append(_row(f"{makers}m{trainers}t", phases, ratio, synchronous))
    return rows


def advise(phases: Phases, rows: Sequence[Row]) -> str:
    """One or two sentences: whether to run detached, how, and what is in the way then."""
    ahead = [row for row in rows if row.setup.max_staleness]
    fastest = min(row.prediction.seconds for row in ahead)
    alike = [row for row in ahead if row.prediction.seconds <= fastest * WORTH_IT]
    best = min(alike, key=lambda row: row.setup.max_staleness)
    if best.speed_up < WORTH_IT:
        return (
            f"Detached makers would not help this job: at best {best.speed_up:.2f} times as fast "
            f"as the synchronous run, since one phase takes nearly all of a step."
        )
    keys = f"detached.makers={best.setup.num_makers} detached.trainers={best.setup.num_trainers}"
    return (
        f"Take {keys} detached.max_staleness={best.setup.max_staleness}: "
        f"{best.prediction.seconds:.3g} s a step, {best.speed_up:.2f} times as fast as the "
        f"synchronous run. {_way_on(phases, best)}"
    )


def _way_on(phases: Phases, row: Row) -> str:
    """What would make the advised run faster."""
    if row.limit == "weights":
        return "Taking weights limits it then: send only what changed of them."
    if row.limit == "staleness bound":
        return "The staleness bound limits it then: a wider one, or smaller pieces of a batch."
    grown = {
        "makers": replace(row.setup, num_makers=row.setup.num_makers + 1),
        "trainer": replace(row.setup, num_trainers=row.setup.num_trainers + 1),
    }[row.limit]
    after = simulate(phases, grown).seconds
    one = {"makers": "maker", "trainer": "trainer"}[row.limit]
    verb = "limit" if row.limit == "makers" else "limits"
    return f"The {row.limit} {verb} it then: with one {one} more a step takes {after:.3g} s."


def _row(name: str, phases: Phases, setup: Setup, synchronous: float) -> Row:
    prediction = simulate(phases, setup)
    speed_up = synchronous / prediction.seconds
    return Row(name, setup, prediction, speed_up, what_limits(phases, setup))


def _table(rows: Sequence[Row]) -> list[list[str]]:
    """Heading and cells."""
    heading = ["makers", "trainers", "run", "s/step", "speed-up", "makers busy", "waiting"]
    cells = [[*heading, "syncing", "trainer busy", "limited by"]]
    for row in rows:
        of = row.prediction.share
        cells.append(
            [
                str(row.setup.num_makers),
                str(row.setup.num_trainers),
                row.name,
                f"{row.prediction.seconds:.3g}",
                f"{row.speed_up:.2f}",
                *(f"{of('maker', state):.0%}" for state in ("busy", "waiting", "syncing")),
                f"{of('trainer', 'busy'):.0%}",
                row.limit,
            ]
        )
    return cells


def _phase_line(phases: Phases) -> str:
    """The phases' mean seconds."""
    names = {
        "generation of a batch": phases.generate,
        "scores": phases.score,
        "update and all else": phases.update,
        "weights taken": phases.sync,
    }
    return "; ".join(f"{name} {sum(s) / len(s):.3g} s" for name, s in names.items())


def _phases(options: argparse.Namespace) -> tuple[Phases, list[str]]:
    """From the run folder, the given ones in its stead; or all from the command line."""
    given = {name: getattr(options, name) for name in PHASES if getattr(options, name)}
    if options.run_dir:
        phases, notes = measured_phases(options.run_dir)
    elif missing := {"gen", "update"} - given.keys():
        raise ConfigError(
            f"--{' and --'.join(sorted(missing))} missing: give a run folder, or the seconds of a "
            "batch by --gen, --score, --update and --sync."
        )
    else:
        phases, notes = Phases([0.0], [0.0], [0.0], [0.0]), []
    fields = dict(zip(PHASES, ("generate", "score", "update", "sync"), strict=True))
    phases = replace(phases, **{fields[name]: seconds for name, seconds in given.items()})
    if not (sum(phases.generate) > 0 and sum(phases.update) > 0):
        raise ConfigError("generation and update take time: --gen and --update are above 0.")
    return phases, notes


def _setups(options: argparse.Namespace) -> list[Setup]:
    """Every number of makers with every number of trainers."""
    setups = []
    for trainers in options.trainers:
        for makers in options.makers:
            setup = Setup(
                num_makers=makers,
                num_trainers=trainers,
                pieces=options.pieces,
                limit=options.limit,
                weights_at_once=options.at_once,
                fixed_share=options.fixed_share,
            )
            if options.limit and options.limit < setup.num_pieces:
                raise ConfigError(
                    f"--limit={options.limit} pieces is below a batch of {setup.num_pieces}: the "
                    f"trainer would wait forever. --limit={setup.num_pieces}, or 0 for none."
                )
            setups.append(setup)
    return setups


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("verl-like bench overlap")
    add = parser.add_argument
    add("run_dir", nargs="?")
    for name in PHASES:
        add(f"--{name}", type=seconds)
    add("--makers", type=counts, default=[1, 2])
    add("--trainers", type=counts, default=[1])
    add("--staleness", type=bounds, default=[0, 1, 4])
    add("--pieces", type=count, default=0)
    add("--limit", type=count, default=0)
    add("--at-once", action="store_true")
    add("--fixed-share", type=share, default=0.0)
    add("--json", action="store_true")
    return parser


# argparse names these functions in its refusals


def seconds(text: str) -> list[float]:
    """Seconds of one batch, or of several."""
    found = [float(part) for part in text.split(",")]
    if not all(0 <= second < math.inf for second in found):
        raise argparse.ArgumentTypeError(f"{text}: seconds are 0 or more")
    return found


def counts(text: str) -> list[int]:
    """Numbers of makers or trainers."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 each")
    return found


def bounds(text: str) -> list[int]:
    """Bounds of staleness."""
    found = [count(part) for part in text.split(",")]
    if max(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: one above 0, which is always shown")
    return found


def count(text: str) -> int:
    """A number, or 0."""
    found = int(text)
    if found < 0:
        raise argparse.ArgumentTypeError(f"{text}: 0 or more")
    return found


def share(text: str) -> float:
    """A share of a whole."""
    found = float(text)
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text}: from 0 to 1")
    return found
