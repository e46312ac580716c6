"""The seconds of a run's phases, as its folder has them: what a prediction begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.detached.overlap import Phases
from trainer.report.read import RunData, read_run
from verl_like.errors import ConfigError

Line = Mapping[str, float]
GENERATION, UPDATE = ("generate_sequences", "take"), ("update_actor",)


def measured_phases(folder: str | Path) -> tuple[Phases, list[str]]:
    """The phases of the run in `folder`, synchronous or detached, and what to know of them.

    The first step is left out where there are others: caches and compilers warm up in it.
    """
    data = read_run(folder)
    timed = [line for line in data.metrics if line.get("timing_s/gen", 0.0) > 0.0]
    if not timed:
        raise ConfigError(
            f"{folder}/metrics.jsonl has no timing_s/gen, so nothing says how long its makers "
            "generate; give a PPO run, or the seconds by --gen, --score, --update and --sync."
        )
    timed = timed[1:] or timed
    steps = f"{timed[0]['step']:.0f} to {timed[-1]['step']:.0f}"
    notes = [f"measured in steps {steps} of {folder}", *_notes_on_placement(data)]
    return _phases(timed), notes


def _phases(lines: list[Line]) -> Phases:
    """Of steps; a detached run's generation is what its makers did, not how long it was awaited."""
    score = [line.get("timing_s/score", 0.0) for line in lines]
    generate = [line["timing_s/gen"] for line in lines]
    sync = [line.get("timing_s/update_weights", 0.0) for line in lines]
    rest = [line["timing_s/step"] - line["timing_s/gen"] for line in lines]
    if any(_of_makers(line, "busy") for line in lines):
        generate = [sum(_of_makers(line, "busy")) for line in lines]
        sync = [max(_of_makers(line, "syncing"), default=0.0) for line in lines]
    else:
        rest = [seconds - taken for seconds, taken in zip(rest, sync, strict=True)]
    update = [max(seconds - spent, 0.0) for seconds, spent in zip(rest, score, strict=True)]
    return Phases(generate, score, update, sync)


def _of_makers(line: Line, state: str) -> list[float]:
    """The seconds that each maker was in a state."""
    prefix, suffix = "detached/maker_", f"/{state}_s"
    return [line[name] for name in line if name.startswith(prefix) and name.endswith(suffix)]


def _notes_on_placement(data: RunData) -> list[str]:
    """That generation and update shared devices, if they did."""
    pools = [
        {call.pool for call in data.calls if call.method in methods}
        for methods in (GENERATION, UPDATE)
    ]
    if not pools[0] & pools[1]:
        return []
    return [
        "its makers and trainers share devices: what follows is for makers that have as many again "
        "for themselves; with half of them each, both take about twice as long"
    ]
