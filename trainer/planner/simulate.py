"""Simulate an asynchronous run: seconds per step, and the waits of its roles.

    simulate(Phases([60.0], [5.0], [30.0]), Setup(num_generators=2, max_staleness=1)).seconds

The input is the seconds of each phase, as configured or measured in a run, and the pacing of an
asynchronous run. The simulation uses no thread and no device.

- A batch is `chunks` chunks of equal size, each by one generator. Between two chunks a generator
  takes the newest published weights, if it has older ones; with `immediate_weights`, during a
  chunk, too.
- A chunk of batch b may begin once version b - max_staleness is published and, with a
  `max_inflight`, fewer chunks than that are queued or in generation.
- The trainer takes a batch when all its chunks have arrived, scores it, updates, and publishes a
  version.

`prediction_lines` simulates a measured run's phases with another configuration.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.async_training.config import AsyncConfig, open_at_once
from trainer.async_training.topology import ANY_RANK, Topology
from trainer.report.accounts import seconds_by_role
from trainer.report.read import read_run
from verl_like.errors import ConfigError

STEPS = 200
"""Number of simulated steps, enough that the first, which has no overlap, does not matter."""


@dataclass(frozen=True)
class Phases:
    """Seconds of each phase: one number, or the numbers of several steps, which repeat."""

    generate: Sequence[float]
    """Seconds of a whole batch by one generator."""
    score: Sequence[float]
    update: Sequence[float]
    sync: Sequence[float] = (0.0,)
    """Seconds that a generator needs to load one version of the weights."""

    def times(self, generate: float = 1.0, train: float = 1.0, sync: float = 1.0) -> Phases:
        """Return the phases with their seconds times these factors."""
        return Phases(
            [generate * seconds for seconds in self.generate],
            [train * seconds for seconds in self.score],
            [train * seconds for seconds in self.update],
            [sync * seconds for seconds in self.sync],
        )


@dataclass(frozen=True)
class Setup:
    """The numbers of generators and trainers, and the largest staleness."""

    num_generators: int = 1
    num_trainers: int = 1
    """Number of trainers, by which the seconds of scoring and updates are divided."""
    max_staleness: int = 0
    """Largest staleness in weight versions; 0 simulates the synchronous run."""
    chunks: int = 0
    """Chunks per batch; 0: one per generator, and the same number for every trainer rank."""
    max_inflight: int = 0
    """Chunks that may be queued or in generation together; 0: limited only by the staleness."""
    immediate_weights: bool = False
    """True if a generator takes new weights during a call, False if only between calls."""
    fixed_fraction: float = 0.0
    """Fraction of generation time that fewer rows do not reduce, due to the longest response."""
    generators_by_rank: tuple[tuple[int, ...], ...] = ()
    """The generators of each trainer rank, if ranks have separate generators; otherwise ()."""

    @property
    def num_chunks(self) -> int:
        """Chunks of a batch."""
        ranks = self.generators_by_rank
        return self.chunks or (len(ranks) * max(map(len, ranks)) if ranks else self.num_generators)

    def generators_of(self, place: int) -> Sequence[int]:
        """Return the generators that may generate the chunk at this position of a batch."""
        if not self.generators_by_rank:
            return range(self.num_generators)
        return self.generators_by_rank[place * len(self.generators_by_rank) // self.num_chunks]


@dataclass(frozen=True)
class Prediction:
    """The result of a simulation."""

    seconds: float
    """Wall time per step."""
    shares: dict[str, dict[str, float]]
    """Role -> the fractions of the wall time in which it is busy, waiting, and syncing."""
    staleness: Counter[int]
    """Versions between generation and update -> number of chunks."""

    def share(self, role: str, state: str) -> float:
        """Return the mean fraction of time in `state` over roles whose names begin with `role`."""
        shares = [states[state] for name, states in self.shares.items() if name.startswith(role)]
        return sum(shares) / len(shares)


class _Generator:
    """A simulated generator, and its total times so far."""

    version = 0
    free_at = busy = syncing = 0.0

    def take(self, version: int, now: float, sync: Sequence[float]) -> float:
        """Begin to load these weights now, and return the time when they are loaded."""
        seconds = sync[version % len(sync)]
        self.version, self.syncing = version, self.syncing + seconds
        return now + seconds

    def begin(self, allowed: float, published: Sequence[float], sync: Sequence[float]) -> float:
        """Return the time when the generator starts a chunk that may start at `allowed`.

        While the generator is idle, it takes each new version as soon as it is published.
        """
        now = self.free_at
        while True:
            newest = bisect_right(published, now) - 1
            if newest > self.version:
                now = self.take(newest, now, sync)
                continue
            coming = published[self.version + 1 : self.version + 2]
            if not coming or coming[0] > allowed:
                return max(now, allowed)
            now = coming[0]


def simulate(phases: Phases, setup: Setup, num_steps: int = STEPS) -> Prediction:
    """Simulate the run, chunk by chunk in the order in which they begin.

    `published[v]` is the time when the trainer has version v, `taken[v]` the time when it begins
    the step from version v.
    """
    generators = [_Generator() for _ in range(setup.num_generators)]
    published, taken, train_busy = [0.0], list[float](), 0.0
    staleness: Counter[int] = Counter()
    size, sync = setup.num_chunks, phases.sync
    share = setup.fixed_fraction + (1 - setup.fixed_fraction) / size
    for step in range(num_steps):
        ends = []
        for place in range(size):
            allowed = published[max(step - setup.max_staleness, 0)]
            if setup.max_inflight and step * size + place >= setup.max_inflight:
                allowed = max(allowed, taken[(step * size + place - setup.max_inflight) // size])
            generator = min(
                (generators[n] for n in setup.generators_of(place)), key=lambda m: m.free_at
            )
            begin = generator.begin(allowed, published, sync)
            staleness[step - generator.version] += 1
            seconds = phases.generate[step % len(phases.generate)] * share
            generator.busy += seconds
            generator.free_at = begin + seconds
            while setup.immediate_weights and generator.version < len(published) - 1:
                if published[generator.version + 1] >= generator.free_at:
                    break
                generator.free_at = generator.take(generator.version + 1, generator.free_at, sync)
            ends.append(generator.free_at)
        taken.append(max(*ends, published[-1]))
        scored, updated = (of[step % len(of)] for of in (phases.score, phases.update))
        seconds = (scored + updated) / setup.num_trainers
        train_busy += seconds
        published.append(taken[-1] + seconds)

    wall = published[-1]
    spent = {"trainer": (train_busy, 0.0)}
    spent |= {
        f"generator {n}": (generator.busy, generator.syncing)
        for n, generator in enumerate(generators)
    }
    shares = {}
    for role, (busy, syncing) in spent.items():
        waiting = max(wall - busy - syncing, 0.0)
        shares[role] = {"busy": busy / wall, "waiting": waiting / wall, "syncing": syncing / wall}
    return Prediction(wall / num_steps, shares, staleness)


def bottleneck(phases: Phases, setup: Setup) -> str:
    """Return the main limit of the run: `generators`, `trainer`, `weights` or `staleness bound`.

    To find it, the run is simulated again with a fifth less time for each part in turn, or with the
    bound one version higher.
    """
    faster = {
        "trainer": (phases.times(train=0.8), setup),
        "generators": (phases.times(generate=0.8), setup),
        "weights": (phases.times(sync=0.8), setup),
        "staleness bound": (phases, replace(setup, max_staleness=setup.max_staleness + 1)),
    }
    seconds = {name: simulate(*run, STEPS // 4).seconds for name, run in faster.items()}
    return min(seconds, key=lambda name: seconds[name])


def measured_phases(folder: str | Path) -> tuple[Phases, list[str]]:
    """Return the phases of the run in `folder`, synchronous or asynchronous, and notes on them.

    The first step is left out if there are others, because caches and compilers warm up in it.
    """
    data = read_run(folder)
    timed = [line for line in data.metrics if line.get("timing_s/gen", 0.0) > 0.0]
    if not timed:
        raise ConfigError(
            f"{folder}/metrics.jsonl has no timing_s/gen, so the time of generation is unknown. "
            "Pass a PPO run folder, or set the seconds with --gen-s, --score-s, "
            "--update-s and --sync-s."
        )
    timed = timed[1:] or timed
    phases = Phases(*map(list, zip(*map(_phases_of, timed), strict=True)))
    steps = f"{timed[0]['step']:.0f} to {timed[-1]['step']:.0f}"
    notes = [f"measured in steps {steps} of {folder}"]
    # pools that both generated and trained
    generated, trained = (
        {call.pool for call in data.calls if call.method in methods}
        for methods in (("generate_sequences", "take"), ("update_actor",))
    )
    if generated & trained:
        notes.append(
            "in this run, generation and training share devices. The prediction assumes that "
            "generators get the same number of separate devices. If you split the same devices in "
            "half, both take about twice as long"
        )
    return phases, notes


def _phases_of(line: Mapping[str, float]) -> tuple[float, float, float, float]:
    """Return the seconds of a step's generation, scores, update and weight sync.

    The generation of an asynchronous run is the busy time of its generators, not the wait for it.
    """
    generate, score = line["timing_s/gen"], line.get("timing_s/score", 0.0)
    sync = line.get("timing_s/update_weights", 0.0)
    rest = line["timing_s/step"] - generate - score
    generators = [spent for role, spent in seconds_by_role([line]).items() if role != "trainer"]
    if any(spent["busy"] for spent in generators):
        generate = sum(spent["busy"] for spent in generators)
        sync = max(spent["syncing"] for spent in generators)
    else:
        rest -= sync
    return generate, score, max(rest, 0.0), sync


def setup_of(config: AsyncConfig) -> Setup:
    """Return the setup of the simulation; chunks that a generator begins together count as one."""
    async_training, topology = config.async_training, config.topology
    numbers = {config.chunks_in_parallel(generator) for generator in range(topology.generators)}
    at_once = numbers.pop() if len(numbers) == 1 else 1  # generating them one by one is not faster
    prompts = config.chunk_size * at_once
    return Setup(
        num_generators=topology.generators,
        num_trainers=1,  # the measured seconds are those of all ranks
        max_staleness=async_training.max_staleness,
        chunks=config.data.train_batch_size // prompts,
        max_inflight=open_at_once(config) // (prompts * config.actor_rollout_ref.rollout.n),
        immediate_weights=async_training.weight_update == "immediate",
        generators_by_rank=tuple(sorted(generators_by_rank(topology))[::at_once]),
    )


def generators_by_rank(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return each rank's generators; empty if any rank takes any sample."""
    ranks = topology.routed_ranks
    return tuple(tuple(topology.generators_for(r)) for r in ranks) if ranks != [ANY_RANK] else ()


def prediction_lines(config: AsyncConfig, phases: Phases) -> list[str]:
    """Describe the predicted seconds per step, the busy shares, and the limit."""
    setup = setup_of(config)
    prediction = simulate(phases, setup)
    shares = {role: f"{states['busy']:.0%}" for role, states in sorted(prediction.shares.items())}
    busy = ", ".join(f"{role} {share}" for role, share in shares.items())
    limit = bottleneck(phases, setup)
    return [f"Step: {prediction.seconds:.3g} s", f"Busy: {busy}", f"Limited by: {limit}"]
