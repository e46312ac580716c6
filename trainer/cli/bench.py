"""usage: verl-like bench overlap RUN_DIR
       verl-like bench overlap --gen 1.2 --score 0.3 --update 0.8 --sync 0.1
           [--generators 1,2] [--trainers 1] [--staleness 0,1,4] [--json] ...

`overlap` predicts how fast an asynchronous run would be. It reads the seconds of each phase from a
run, or from the options, and simulates several numbers of generators: seconds per step, speed-up
over the synchronous run, who is idle, and what limits the speed. Nothing is started.

  --pieces 4          parts of a batch, each from one generator; by default one per generator
  --limit 8           parts that may be queued or in generation at once
  --at-once           generators take new weights in the middle of a part
  --fixed-share 0.5   share of the generation that more generators do not shorten, because the
                      longest response takes it
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.async_training.topology import Topology
from trainer.planner.simulate import (
    Phases,
    Prediction,
    Setup,
    bottleneck,
    generators_by_rank,
    measured_phases,
    simulate,
)
from verl_like.errors import ConfigError
from verl_like.terminal import draw_table, fit, terminal_width

RATIOS = ((1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
"""The numbers of (generators, trainers) of the sweep."""
PHASES = {"gen": "generate", "score": "score", "update": "update", "sync": "sync"}
"""Option -> field of `Phases`."""
WORTH_IT = 1.05
"""Speed-up below which asynchronous runs are not advised, and within which two runs count as equal.
"""
ADVICE = {
    "weights": "Taking weights limits it then: send only what changed of them.",
    "staleness bound": "The staleness bound limits it then: a wider one, or smaller pieces.",
    "generators": "The generators limit it then: with one generator more a step takes {:.3g} s.",
    "trainer": "The trainer limits it then: with one trainer more a step takes {:.3g} s.",
}
"""Limit of a run -> advice to make it faster."""


@dataclass(frozen=True)
class PredictedRun:
    """A predicted run."""

    name: str
    setup: Setup
    prediction: Prediction
    speed_up: float
    """Ratio to the synchronous run with as many generators and trainers."""
    limit: str

    @classmethod
    def of(cls, name: str, phases: Phases, setup: Setup) -> PredictedRun:
        """Simulate the run and the synchronous one."""
        synchronous = simulate(phases, replace(setup, max_staleness=0)).seconds
        prediction = simulate(phases, setup)
        speed_up = synchronous / prediction.seconds
        return cls(name, setup, prediction, speed_up, bottleneck(phases, setup))

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            **asdict(self.setup),
            "seconds_a_step": self.prediction.seconds,
            "speed_up": self.speed_up,
            "limit": self.limit,
            "shares": self.prediction.shares,
            "staleness": dict(self.prediction.staleness),
        }

    def cells(self) -> list[str]:
        """Return the cells of the run's line in the table."""
        share = self.prediction.share
        return [
            str(self.setup.num_generators),
            str(self.setup.num_trainers),
            self.name,
            f"{self.prediction.seconds:.3g}",
            f"{self.speed_up:.2f}",
            *(f"{share('generator', state):.0%}" for state in ("busy", "waiting", "syncing")),
            f"{share('trainer', 'busy'):.0%}",
            self.limit,
        ]


HEADING = ["generators", "trainers", "run", "s/step", "speed-up"]
HEADING += ["generators busy", "waiting", "syncing", "trainer busy", "limited by"]


def main(arguments: Sequence[str]) -> None:
    """Run `overlap`."""
    if arguments[:1] == ["overlap"]:
        overlap(arguments[1:])
    else:
        sys.exit(__doc__)


def overlap(arguments: Sequence[str]) -> None:
    """Print the predictions as tables or as JSON."""
    options = _parser().parse_args(arguments)
    # phases of the run folder, overridden by the command line
    seconds_of = {name: getattr(options, name) for name in PHASES if getattr(options, name)}
    if options.run_dir:
        phases, notes = measured_phases(options.run_dir)
    elif missing := {"gen", "update"} - seconds_of.keys():
        raise ConfigError(
            f"--{' and --'.join(sorted(missing))} missing: give a run folder, or the seconds of a "
            "batch by --gen, --score, --update and --sync."
        )
    else:
        phases, notes = Phases([0.0], [0.0], [0.0], [0.0]), []
    phases = replace(phases, **{PHASES[name]: seconds for name, seconds in seconds_of.items()})
    if not (sum(phases.generate) > 0 and sum(phases.update) > 0):
        zero = [name for name in ("gen", "update") if not sum(getattr(phases, PHASES[name])) > 0]
        where = f"{options.run_dir} has none of" if options.run_dir else "none is given of"
        raise ConfigError(
            f"generation and update take time, and {where} {' and '.join(zero)}: give seconds "
            f"above 0 by --{' and --'.join(zero)}."
        )
    # every number of generators with every number of trainers
    setups = [
        _resized(
            Setup(
                pieces=options.pieces,
                limit=options.limit,
                weights_at_once=options.at_once,
                fixed_share=options.fixed_share,
            ),
            generators,
            trainers,
        )
        for trainers in options.trainers
        for generators in options.generators
    ]
    num_pieces = max(setup.num_pieces for setup in setups)
    if 0 < options.limit < num_pieces:
        raise ConfigError(
            f"--limit={options.limit} is less than a batch of {num_pieces} pieces: the trainer "
            f"would wait forever. Set --limit={num_pieces}, or 0 for no limit."
        )
    for setup in setups:
        if lopsided := Topology.of(setup.num_generators, setup.num_trainers).lopsided:
            notes.append(f"of {setup.num_generators}m{setup.num_trainers}t {lopsided}")
    rows = []
    for setup in setups:
        for bound in sorted({0, *options.staleness}):
            name = f"staleness {bound}" if bound else "synchronous"
            rows.append(PredictedRun.of(name, phases, replace(setup, max_staleness=bound)))
    widest = replace(setups[0], max_staleness=max(options.staleness))
    ratios = []
    for generators, trainers in RATIOS:
        setup = _resized(widest, generators, trainers)
        ratios.append(PredictedRun.of(f"{generators}m{trainers}t", phases, setup))
    advice = advise(phases, rows)

    if options.json:
        report = {
            "phases": asdict(phases),
            "notes": notes,
            "runs": [row.as_json() for row in rows],
            "ratios": [row.as_json() for row in ratios],
            "advice": advice,
        }
        print(json.dumps(report))
        return
    width = terminal_width()
    means = {name: sum(of) / len(of) for name, of in asdict(phases).items()}
    lines = [
        *(fit(f"{note[0].upper()}{note[1:]}.", width) for note in notes),
        f"generation of a batch {means['generate']:.3g} s; scores {means['score']:.3g} s; "
        f"update and all else {means['update']:.3g} s; weights taken {means['sync']:.3g} s",
        "",
        *_table(rows, width),
        "",
        f"Generators to trainers, at staleness {widest.max_staleness}:",
        *_table(ratios, width),
        "",
        fit(advice, width),
    ]
    print("\n".join(lines), flush=True)


def advise(phases: Phases, rows: Sequence[PredictedRun]) -> str:
    """Advise whether to run asynchronously and how, and name the limit of that run."""
    asynchronous = [row for row in rows if row.setup.max_staleness]
    fastest = min(row.prediction.seconds for row in asynchronous)
    alike = [row for row in asynchronous if row.prediction.seconds <= fastest * WORTH_IT]
    best = min(alike, key=lambda row: row.setup.max_staleness)
    if best.speed_up < WORTH_IT:
        return (
            f"Asynchronous training would not help this job: at best {best.speed_up:.2f} times as "
            "fast as the synchronous run, since one phase takes nearly all of a step."
        )
    setup = best.setup
    larger = {
        "generators": _resized(setup, setup.num_generators + 1, setup.num_trainers),
        "trainer": _resized(setup, setup.num_generators, setup.num_trainers + 1),
    }
    after = simulate(phases, larger.get(best.limit, setup)).seconds
    return (
        f"Take async_training.generators={setup.num_generators} "
        f"async_training.trainers={setup.num_trainers} "
        f"async_training.max_staleness={setup.max_staleness}: {best.prediction.seconds:.3g} s a "
        f"step, {best.speed_up:.2f} times as fast as the synchronous run. "
        f"{ADVICE[best.limit].format(after)}"
    )


def _table(rows: Sequence[PredictedRun], width: int | None) -> list[str]:
    cells = [HEADING, *(row.cells() for row in rows)]
    return draw_table(cells, width, num_titles=3, flush_right=True)


def _resized(setup: Setup, generators: int, trainers: int) -> Setup:
    """Return the setup with these numbers of generators and trainers, and the default routes."""
    ranks = generators_by_rank(Topology.of(generators, trainers))
    return replace(
        setup, num_generators=generators, num_trainers=trainers, generators_by_rank=ranks
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("verl-like bench overlap")
    add = parser.add_argument
    add("run_dir", nargs="?")
    for name in PHASES:
        add(f"--{name}", type=_Numbers(float, 0))
    add("--generators", type=_Numbers(int, 1), default=[1, 2])
    add("--trainers", type=_Numbers(int, 1), default=[1])
    add("--staleness", type=_Numbers(int, 0, largest=1), default=[0, 1, 4])
    add("--pieces", type=_Number(int, 0), default=0)
    add("--limit", type=_Number(int, 0), default=0)
    add("--at-once", action="store_true")
    add("--fixed-share", type=_Number(float, 0, 1), default=0.0)
    add("--json", action="store_true")
    return parser


@dataclass(frozen=True)
class _Number:
    """Reads a number in a range."""

    kind: type[int] | type[float]
    low: float
    high: float = math.inf

    def __call__(self, text: str) -> Any:
        with suppress(ValueError):
            number = self.kind(text)
            if self.low <= number <= self.high and number < math.inf:
                return number
        range_of = f"{self.low} or more" if self.high == math.inf else f"{self.low} to {self.high}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {range_of}")


@dataclass(frozen=True)
class _Numbers(_Number):
    """Reads numbers separated by commas, one of them at least as large as `largest`."""

    largest: float = 0

    def __call__(self, text: str) -> Any:
        numbers = [super(_Numbers, self).__call__(part) for part in text.split(",")]
        if max(numbers) < self.largest:
            raise argparse.ArgumentTypeError(f"{text!r} has no number of {self.largest} or more")
        return numbers
