"""Predicts what detached makers and trainers gain, from the seconds that the phases take.

A simulation of the run's events with the pacing of `trainer.detached`, no thread and no device. The
rules:

- A batch is `pieces` pieces of equal rows. Each is made by one maker. Between two pieces a maker
  takes the newest published weights, if it has older ones.
- With p pieces begun and not yet taken, one more may begin while
  p + 1 <= demand + max_staleness * pieces. The demand is a batch while the trainer waits for one,
  else 0.
- The trainer takes a batch when all its pieces are there, scores it, updates, publishes a version.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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

    @property
    def num_pieces(self) -> int:
        """Pieces of a batch."""
        return self.pieces or self.num_makers

    def piece_seconds(self, phases: Phases, piece: int) -> float:
        """How long one maker makes the piece with this number."""
        batch_seconds = phases.generate[piece // self.num_pieces % len(phases.generate)]
        return batch_seconds * (self.fixed_share + (1 - self.fixed_share) / self.num_pieces)

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


class _Event(NamedTuple):
    """Something that ends at `time`; events of one time come in the order of `number`."""

    time: float
    number: int
    kind: str
    """`generated`, `synced` or `trained`."""
    maker: int


@dataclass
class _Maker:
    version: int = 0
    piece: int = 0
    """The number of the piece that it makes, or made last."""
    state: str = "idle"
    """`idle`, `syncing` or `generating`."""
    drawn_by: int = 0
    """The version that began its piece."""
    ends: float = 0.0
    """When it will have the weights, or the piece; weights taken at once move it."""
    busy: float = 0.0
    syncing: float = 0.0


class _Run:
    """The state of a simulated run; `predict` goes through its events."""

    def __init__(self, phases: Phases, setup: Setup) -> None:
        self.phases, self.setup = phases, setup
        self.now = 0.0
        self.makers = [_Maker() for _ in range(setup.num_makers)]
        self.version = 0
        """The newest; the trainer's step with this number begins from it."""
        self.is_training = False
        self.trainer_busy = 0.0
        self.num_begun = 0
        self.queue: dict[int, int] = {}
        """Piece -> the version that began it."""
        self.staleness: Counter[int] = Counter()
        self._events: list[_Event] = []
        self._numbers = itertools.count()

    def predict(self, num_steps: int) -> Prediction:
        """Go through the events of these steps."""
        while self.version < num_steps:
            self._go_on()
            event = heapq.heappop(self._events)
            if event.kind == "generated" and event.time < self.makers[event.maker].ends:
                continue  # weights came in the middle of the piece, which ends later
            self.now = event.time
            if event.kind == "trained":
                self._publish()
            elif event.kind == "synced":
                self.makers[event.maker].state = "idle"
            else:
                self._put(self.makers[event.maker])
        return self._prediction(num_steps)

    def _go_on(self) -> None:
        """All that can happen at this moment."""
        self._take()
        for number, maker in enumerate(self.makers):
            if maker.state != "idle":
                continue
            if maker.version < self.version:
                self._sync(number)
            elif self._may_begin():
                self._generate(number)

    def _may_begin(self) -> bool:
        """Whether pacing lets one more piece begin, by a maker with the newest weights."""
        size = self.setup.num_pieces
        num_taken = (self.version + self.is_training) * size
        demand = 0 if self.is_training else size
        room = demand + self.setup.max_staleness * size
        return self.num_begun + 1 - num_taken <= min(room, self.setup.limit or room)

    def _sync(self, number: int) -> None:
        """The maker takes the version that is the newest now."""
        maker = self.makers[number]
        maker.state, maker.version = "syncing", self.version
        maker.ends = self.now + self._sync_seconds()
        maker.syncing += self._sync_seconds()
        self._at(maker.ends, "synced", number)

    def _generate(self, number: int) -> None:
        maker = self.makers[number]
        maker.piece, self.num_begun = self.num_begun, self.num_begun + 1
        seconds = self.setup.piece_seconds(self.phases, maker.piece)
        maker.state, maker.drawn_by, maker.ends = "generating", maker.version, self.now + seconds
        maker.busy += seconds
        self._at(maker.ends, "generated", number)

    def _put(self, maker: _Maker) -> None:
        """The maker's piece is queued."""
        self.queue[maker.piece] = maker.drawn_by
        maker.state = "idle"

    def _take(self) -> None:
        """The trainer takes the next batch, if it waits and all pieces are there."""
        size = self.setup.num_pieces
        batch = range(self.version * size, (self.version + 1) * size)
        if self.is_training or not all(piece in self.queue for piece in batch):
            return
        self.staleness.update(self.version - self.queue.pop(piece) for piece in batch)
        seconds = self.setup.train_seconds(self.phases, self.version)
        self.is_training = True
        self.trainer_busy += seconds
        self._at(self.now + seconds, "trained")

    def _publish(self) -> None:
        """The trainer has a new version."""
        self.is_training = False
        self.version += 1
        if not self.setup.weights_at_once:
            return
        for number, maker in enumerate(self.makers):
            if maker.state == "generating":
                maker.version = self.version
                maker.ends += self._sync_seconds()
                maker.syncing += self._sync_seconds()
                self._at(maker.ends, "generated", number)

    def _sync_seconds(self) -> float:
        return self.phases.sync[self.version % len(self.phases.sync)]

    def _at(self, time: float, kind: str, maker: int = 0) -> None:
        heapq.heappush(self._events, _Event(time, next(self._numbers), kind, maker))

    def _prediction(self, num_steps: int) -> Prediction:
        """What has been, less what makers had begun that ends after the last step."""
        worked = {"trainer": (self.trainer_busy, 0.0)}
        for number, maker in enumerate(self.makers):
            ahead = dict.fromkeys(("generating", "syncing"), 0.0)
            ahead |= {maker.state: maker.ends - self.now}
            busy, syncing = maker.busy - ahead["generating"], maker.syncing - ahead["syncing"]
            worked[f"maker {number}"] = busy, syncing
        return _prediction(worked, self.now, num_steps, self.staleness)


def _prediction(
    worked: Mapping[str, tuple[float, float]], wall: float, num_steps: int, staleness: Counter[int]
) -> Prediction:
    """From the seconds (busy, syncing) of every role; a role waits in what is left of the wall."""
    shares = {}
    for role, (busy, syncing) in worked.items():
        busy, syncing = busy / wall, syncing / wall
        shares[role] = {"busy": busy, "waiting": max(1 - busy - syncing, 0.0), "syncing": syncing}
    return Prediction(wall / num_steps, shares, staleness)


def simulate(phases: Phases, setup: Setup, num_steps: int = STEPS) -> Prediction:
    """The run of `setup`, event by event."""
    return _Run(phases, setup).predict(num_steps)


def one_step_ahead(phases: Phases, setup: Setup, num_steps: int = STEPS) -> Prediction:
    """The run whose makers make the next batch while the trainer trains, and then all sync.

    Both wait for each other after every step, which `max_staleness=1` does not ask for.
    """
    made = [_makespan(phases, setup, step) for step in range(num_steps)]
    wall, syncing = max(made[0]), 0.0
    busy = [*made[0]]
    for step in range(num_steps):
        following = made[step + 1] if step + 1 < num_steps else [0.0] * setup.num_makers
        sync = phases.sync[step % len(phases.sync)]
        wall += max(*following, setup.train_seconds(phases, step)) + sync
        syncing += sync
        busy = [before + more for before, more in zip(busy, following, strict=True)]

    train = sum(setup.train_seconds(phases, step) for step in range(num_steps))
    worked = {"trainer": (train, syncing)}
    worked |= {f"maker {number}": (spent, syncing) for number, spent in enumerate(busy)}
    size = setup.num_pieces
    return _prediction(worked, wall, num_steps, Counter({0: size, 1: size * (num_steps - 1)}))


def _makespan(phases: Phases, setup: Setup, step: int) -> list[float]:
    """Seconds that each maker works on a batch whose pieces go to the first that is free."""
    busy = [0.0] * setup.num_makers
    for piece in range(step * setup.num_pieces, (step + 1) * setup.num_pieces):
        busy[busy.index(min(busy))] += setup.piece_seconds(phases, piece)
    return busy


def what_limits(
    phases: Phases,
    setup: Setup,
    predict: Callable[[Phases, Setup, int], Prediction] = simulate,
) -> str:
    """Whose speed the run depends on most: `makers`, `trainer`, `weights` or `staleness bound`.

    Each is made a fifth faster, or the bound wider by one version, and the run simulated again.
    """
    faster = {
        "trainer": (phases.times(train=0.8), setup),
        "makers": (phases.times(generate=0.8), setup),
        "weights": (phases.times(sync=0.8), setup),
        "staleness bound": (phases, replace(setup, max_staleness=setup.max_staleness + 1)),
    }
    seconds = {name: predict(*run, STEPS // 4).seconds for name, run in faster.items()}
    return min(seconds, key=lambda name: seconds[name])
