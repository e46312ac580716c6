"""What a detached run will do: in words from its configuration, in seconds by simulation.

The simulation takes the seconds of each phase, given or measured in a run, and the pacing of
`trainer.detached`; no thread and no device:

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

from trainer.detached.config import DetachedConfig, open_at_once, samples_per_batch
from trainer.detached.topology import ANY_RANK, Topology
from trainer.report.detached import seconds_by_role
from trainer.report.read import RunData, read_run
from verl_like.errors import ConfigError

STEPS = 200
"""Enough of them that the first one, which nothing runs beside, does not count."""
AGES = {0: "as new as the policy", 1: "at most 1 version old"}
MOMENTS = {"at_boundary": "between two pieces", "at_once": "in the middle of a piece"}


# -------------------------------------------------------------------------------------- simulation


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
        ranks = self.makers_by_rank
        return self.pieces or (len(ranks) * max(map(len, ranks)) if ranks else self.num_makers)

    def makers_of(self, place: int) -> Sequence[int]:
        """The makers that may make the piece at this place in a batch."""
        if not self.makers_by_rank:
            return range(self.num_makers)
        return self.makers_by_rank[place * len(self.makers_by_rank) // self.num_pieces]


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


class _Maker:
    """When a simulated maker is free again, and what it did until then."""

    version = 0
    free_at = busy = syncing = 0.0

    def take(self, version: int, now: float, sync: Sequence[float]) -> float:
        """When it has these weights, which it begins to take now."""
        seconds = sync[version % len(sync)]
        self.version, self.syncing = version, self.syncing + seconds
        return now + seconds

    def begin(self, allowed: float, published: Sequence[float], sync: Sequence[float]) -> float:
        """When it begins a piece that may begin then: with the newest weights of that moment.

        It takes every version as soon as it is idle and the version is there.
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
    """The run of `setup`, piece by piece in the order in which they begin.

    `published[v]` is when the trainer has version v, `taken[v]` when it begins the step from it.
    """
    makers = [_Maker() for _ in range(setup.num_makers)]
    published, taken, train_busy = [0.0], list[float](), 0.0
    staleness: Counter[int] = Counter()
    size, sync = setup.num_pieces, phases.sync
    share = setup.fixed_share + (1 - setup.fixed_share) / size
    for step in range(num_steps):
        ends = []
        for place in range(size):
            allowed = published[max(step - setup.max_staleness, 0)]
            if setup.limit and step * size + place >= setup.limit:
                allowed = max(allowed, taken[(step * size + place - setup.limit) // size])
            maker = min((makers[n] for n in setup.makers_of(place)), key=lambda one: one.free_at)
            begin = maker.begin(allowed, published, sync)
            staleness[step - maker.version] += 1
            seconds = phases.generate[step % len(phases.generate)] * share
            maker.busy += seconds
            maker.free_at = begin + seconds
            while setup.weights_at_once and maker.version < len(published) - 1:
                if published[maker.version + 1] >= maker.free_at:
                    break
                maker.free_at = maker.take(maker.version + 1, maker.free_at, sync)
            ends.append(maker.free_at)
        taken.append(max(*ends, published[-1]))
        scored, updated = (of[step % len(of)] for of in (phases.score, phases.update))
        seconds = (scored + updated) / setup.num_trainers
        train_busy += seconds
        published.append(taken[-1] + seconds)

    wall = published[-1]
    spent = {"trainer": (train_busy, 0.0)}
    spent |= {f"maker {n}": (one.busy, one.syncing) for n, one in enumerate(makers)}
    shares = {}
    for role, (busy, syncing) in spent.items():
        waiting = max(wall - busy - syncing, 0.0)
        shares[role] = {"busy": busy / wall, "waiting": waiting / wall, "syncing": syncing / wall}
    return Prediction(wall / num_steps, shares, staleness)


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
    phases = Phases(*map(list, zip(*map(_phases_of, timed), strict=True)))
    steps = f"{timed[0]['step']:.0f} to {timed[-1]['step']:.0f}"
    notes = [f"measured in steps {steps} of {folder}"]
    if _shared_pools(data):
        notes.append(
            "its makers and trainers share devices: what follows is for makers that have as many "
            "again for themselves; with half of them each, both take about twice as long"
        )
    return phases, notes


def _phases_of(line: Mapping[str, float]) -> tuple[float, float, float, float]:
    """Seconds of a step's generation, scores, update and weights.

    A detached run's generation is what its makers did, not how long it was awaited.
    """
    generate, score = line["timing_s/gen"], line.get("timing_s/score", 0.0)
    sync = line.get("timing_s/update_weights", 0.0)
    rest = line["timing_s/step"] - generate - score
    makers = [spent for role, spent in seconds_by_role([line]).items() if role != "trainer"]
    if any(spent["busy"] for spent in makers):
        generate = sum(spent["busy"] for spent in makers)
        sync = max(spent["syncing"] for spent in makers)
    else:
        rest -= sync
    return generate, score, max(rest, 0.0), sync


def _shared_pools(data: RunData) -> set[str]:
    """The pools that generated as well as trained."""
    made, trained = (
        {call.pool for call in data.calls if call.method in methods}
        for methods in (("generate_sequences", "take"), ("update_actor",))
    )
    return made & trained


# --------------------------------------------------------------------------------- a configuration


def setup_of(config: DetachedConfig) -> Setup:
    """The run as the simulation has it."""
    detached, topology = config.detached, config.topology
    prompts = config.piece_size
    return Setup(
        num_makers=topology.makers,
        num_trainers=1,  # the measured seconds are those of its ranks together
        max_staleness=detached.max_staleness,
        pieces=config.data.train_batch_size // prompts,
        limit=open_at_once(config) // (prompts * config.actor_rollout_ref.rollout.n),
        weights_at_once=detached.new_weights == "at_once",
        makers_by_rank=makers_by_rank(topology),
    )


def makers_by_rank(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """As `Setup` has it."""
    ranks = topology.routed_ranks
    return tuple(tuple(topology.makers_for(r)) for r in ranks) if ranks != [ANY_RANK] else ()


def plan_lines(
    config: DetachedConfig, max_columns: int | None = None, brief: bool = False
) -> list[str]:
    """Who sends what to whom, how far makers run ahead, when weights reach them."""
    detached, topology = config.detached, config.topology
    setup, num_open = setup_of(config), open_at_once(config)
    age = AGES.get(detached.max_staleness, f"at most {detached.max_staleness} versions old")
    rounds = "batch" if detached.update_steps == 1 else f"{detached.update_steps} batches"

    aged = f"a sample is {age} when it is trained on: makers wait rather than let one grow older"
    pieces = (
        f"a batch of {config.data.train_batch_size} prompts is {_count(setup.num_pieces, 'piece')}:"
        f" {_count(config.piece_size, 'prompt')} each, which one maker answers in a call"
    )
    queued = (
        f"at most {num_open} samples are queued or being made "
        f"({num_open / samples_per_batch(config):.3g} times a batch)"
    )
    versions = (
        f"there is a version of the weights after every {rounds}; "
        f"a maker takes it {MOMENTS[detached.new_weights]}"
    )
    drawn = topology.describe(max_columns).splitlines()
    lines = [*drawn, pieces, aged, queued, versions]
    if roles := config.score_roles:
        lines.append(f"makers score what they have made, each with its own {', '.join(roles)}")
    if weights := config.algorithm.rollout_correction.rollout_is:
        lines.append(f"what older weights drew is corrected for: rollout_is={weights}")
    if brief:
        lines = [f"A sample is {age}; at most {num_open} are queued or being made"]
    if topology.lopsided:
        lines.append(topology.lopsided)
    if idle := _idle_makers(config):
        lines.append(
            f"{idle} of {topology.makers} makers have nothing to make, so few pieces are open at "
            "once: smaller ones (detached.prompts_per_piece), or a larger detached.max_staleness"
        )
    return lines


def _idle_makers(config: DetachedConfig) -> int:
    """Makers for whom no piece is left, so few are open at once."""
    ranks = config.topology.routed_ranks
    samples_per_piece = config.piece_size * config.actor_rollout_ref.rollout.n
    num_open = open_at_once(config) // len(ranks) // samples_per_piece
    busy = {maker for rank in ranks for maker in config.topology.makers_for(rank)[:num_open]}
    return config.topology.makers - len(busy)


def prediction_line(config: DetachedConfig, phases: Phases) -> str:
    """Seconds a step, who is busy, and what limits the run, if its phases take as long."""
    setup = setup_of(config)
    found = simulate(phases, setup)
    shares = {role: f"{states['busy']:.0%}" for role, states in sorted(found.shares.items())}
    busy = ", ".join(f"{role} {share}" for role, share in shares.items())
    return f"{found.seconds:.3g} s a step; busy: {busy}; limited by: {what_limits(phases, setup)}"


def _count(number: int, what: str) -> str:
    """`1 piece`, `2 pieces`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
