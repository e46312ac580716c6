"""Predicts what detached makers and trainers gain, from the seconds that the phases take.

A simulation of the run with the pacing of `trainer.detached`, no thread and no device. The rules:

- A batch is `pieces` pieces of equal rows. Each is made by one maker. Between two pieces a maker
  takes the newest published weights, if it has older ones.
- A piece of batch b may begin once version b - max_staleness is published; with a limit, once no
  more pieces than that are queued or in the making.
- The trainer takes a batch when all its pieces are there, scores it, updates, publishes a version.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.report.read import RunData, read_run
from verl_like.errors import ConfigError

STEPS = 200
"""Enough of them that the first one, which nothing runs beside, does not count."""


@dataclass(frozen=True)
class Phases:
    """Seconds of each phase, one number or those of several steps, which repeat."""

    generate: Sequence[float]
    """Of a whole batch, by one maker."""
    score: Sequence[float]
    update: Sequence[float]
    sync: Sequence[float] = (0.0,)
    """Of one maker taking one version."""

    def times(self, generate: float = 1.0, train: float = 1.0, sync: float = 1.0) -> Phases:
        """The phases slower or faster by these factors."""
        return Phases(
            [generate * seconds for seconds in self.generate],
            [train * seconds for seconds in self.score],
            [train * seconds for seconds in self.update],
            [sync * seconds for seconds in self.sync],
        )


@dataclass(frozen=True)
class Setup:
    """Who makes and who trains, and how far apart they may be."""

    num_makers: int = 1
    num_trainers: int = 1
    """Scoring and updates take the seconds of `Phases` divided by this."""
    max_staleness: int = 0
    """In versions; 0 is the synchronous run."""
    pieces: int = 0
    """Of a batch; 0: as many as makers."""
    limit: int = 0
    """Pieces that may be queued or in the making at once; 0: as many as the staleness allows."""
    weights_at_once: bool = False
    """A maker takes new weights in the middle of a piece, not before its next one."""
    fixed_share: float = 0.0
    """Share of a generation's seconds that fewer rows do not shorten: the longest response's."""
    makers_by_rank: tuple[tuple[int, ...], ...] = ()
    """The makers of each trainer rank, if a batch has a part for each; () if all serve all."""

    @property
    def num_pieces(self) -> int:
        """Pieces of a batch."""
        return self.pieces or self.num_makers

    def piece_seconds(self, phases: Phases, piece: int) -> float:
        """How long one maker makes the piece with this number."""
        batch_seconds = phases.generate[piece // self.num_pieces % len(phases.generate)]
        return batch_seconds * (self.fixed_share + (1 - self.fixed_share) / self.num_pieces)

    def makers_of(self, piece: int) -> Sequence[int]:
        """The makers that may make the piece with this number."""
        if not self.makers_by_rank:
            return range(self.num_makers)
        ranks = len(self.makers_by_rank)
        return self.makers_by_rank[piece % self.num_pieces * ranks // self.num_pieces]

    def train_seconds(self, phases: Phases, step: int) -> float:
        """How long the trainer scores and updates in a step."""
        score = phases.score[step % len(phases.score)]
        return (score + phases.update[step % len(phases.update)]) / self.num_trainers


@dataclass(frozen=True)
class Prediction:
    """What a run of some steps comes to."""

    seconds: float
    """Wall time of a step."""
    shares: dict[str, dict[str, float]]
    """Role -> share of the wall time in which it is busy, waiting, syncing."""
    staleness: Counter[int]
    """Versions between draw and update -> pieces."""

    def share(self, role: str, state: str) -> float:
        """Mean over the roles whose names begin so."""
        found = [shares[state] for name, shares in self.shares.items() if name.startswith(role)]
        return sum(found) / len(found)


@dataclass
class _Maker:
    version: int = 0
    free_at: float = 0.0
    busy: float = 0.0
    syncing: float = 0.0


def simulate(phases: Phases, setup: Setup, num_steps: int = STEPS) -> Prediction:
    """The run of `setup`, piece by piece in the order in which they begin.

    `published[v]` is when the trainer has version v, `taken[v]` when it begins the step from it.
    """
    makers = [_Maker() for _ in range(setup.num_makers)]
    published, taken, train_busy = [0.0], list[float](), 0.0
    staleness: Counter[int] = Counter()
    size, sync = setup.num_pieces, phases.sync
    for step in range(num_steps):
        ends = []
        for piece in range(step * size, (step + 1) * size):
            allowed = published[max(step - setup.max_staleness, 0)]
            if setup.limit and piece >= setup.limit:
                allowed = max(allowed, taken[(piece - setup.limit) // size])
            maker = min((makers[n] for n in setup.makers_of(piece)), key=lambda one: one.free_at)
            begin = _synced(maker, max(maker.free_at, allowed), published, sync)
            staleness[step - maker.version] += 1
            end = begin + setup.piece_seconds(phases, piece)
            maker.busy += end - begin
            while setup.weights_at_once and maker.version < len(published) - 1:
                if published[maker.version + 1] >= end:
                    break
                maker.version += 1
                end += sync[maker.version % len(sync)]
                maker.syncing += sync[maker.version % len(sync)]
            maker.free_at = end
            ends.append(end)
        taken.append(max(*ends, published[-1]))
        seconds = setup.train_seconds(phases, step)
        train_busy += seconds
        published.append(taken[-1] + seconds)

    wall = published[-1]
    worked = {"trainer": (train_busy, 0.0)}
    worked |= {f"maker {n}": (one.busy, one.syncing) for n, one in enumerate(makers)}
    return Prediction(wall / num_steps, _shares(worked, wall), staleness)


def _synced(
    maker: _Maker, begin: float, published: Sequence[float], sync: Sequence[float]
) -> float:
    """When the maker begins that may begin at `begin`: with the newest weights of that moment.

    It takes every version as soon as it is idle and the version is there.
    """
    now = maker.free_at
    while True:
        newest = bisect_right(published, now) - 1
        if newest > maker.version:
            maker.version = newest
            now += sync[newest % len(sync)]
            maker.syncing += sync[newest % len(sync)]
        elif maker.version + 1 < len(published) and published[maker.version + 1] <= begin:
            now = published[maker.version + 1]
        else:
            return max(now, begin)


def _shares(worked: Mapping[str, tuple[float, float]], wall: float) -> dict[str, dict[str, float]]:
    """Of the seconds (busy, syncing) of every role; a role waits in what is left of the wall."""
    shares = {}
    for role, (busy, syncing) in worked.items():
        busy, syncing = busy / wall, syncing / wall
        shares[role] = {"busy": busy, "waiting": max(1 - busy - syncing, 0.0), "syncing": syncing}
    return shares


def what_limits(phases: Phases, setup: Setup) -> str:
    """Whose speed the run depends on most: `makers`, `trainer`, `weights` or `staleness bound`.

    Each is made a fifth faster, or the bound wider by one version, and the run simulated again.
    """
    faster = {
        "trainer": (phases.times(train=0.8), setup),
        "makers": (phases.times(generate=0.8), setup),
        "weights": (phases.times(sync=0.8), setup),
        "staleness bound": (phases, replace(setup, max_staleness=setup.max_staleness + 1)),
    }
    seconds = {name: simulate(*run, STEPS // 4).seconds for name, run in faster.items()}
    return min(seconds, key=lambda name: seconds[name])


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
