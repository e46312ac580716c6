"""The experience buffer: what makers have made and trainers have not yet taken, bounded.

    order = buffer.begin(maker, version)      # a maker's thread; waits for room, and for its turn
    buffer.put(experience)
    experiences = buffer.take(num_samples)    # the trainer; waits for a batch
    buffer.publish(version)                   # there are newer weights

It bounds samples that are open, queued or being made: by `detached.limit`, and by how old they may
grow (`trainer.detached.pieces`). One lock guards all of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trainer.detached.activity import Activity
from trainer.detached.ledger import IN_FLIGHT, LOST, MADE_AGAIN, QUEUED, TAKEN, TOO_OLD, Ledger
from trainer.detached.pieces import (
    Begun,
    BufferSettings,
    Demand,
    Experience,
    Order,
    Pacing,
    Piece,
    PieceStream,
    num_samples_of,
)
from trainer.detached.samplers import Choice, Sampler, Stock, chosen
from verl_like.errors import VerlLikeError
from workers.rollout.client import Submission

LOOK_S = 1.0
"""How often a wait looks whether it has lasted too long."""


class ExperienceBuffer:
    """Between makers' threads and the trainer's."""

    def __init__(
        self,
        stream: PieceStream,
        pacing: Pacing,
        sampler: Sampler,
        settings: BufferSettings,
        ledger: Ledger,
        activity: Activity,
    ) -> None:
        """Empty, with weights of version 0."""
        self.stream, self.ledger = stream, ledger
        self.pacing, self._sampler, self._settings = pacing, sampler, settings
        self._activity = activity
        self._changed = threading.Condition()
        self._ready: list[Experience] = []
        self._in_flight: dict[int, tuple[int, Order]] = {}
        """Number of a piece -> who makes it, and what was asked for."""
        self._makers: set[int] = set()
        self._idle: set[int] = set()
        self._left: set[int] = set()
        self.version = 0
        """Of the newest weights that makers can have."""
        self._demand = Demand()
        self._num_taken = 0
        self._failure: BaseException | None = None
        self._closed = self._paused = False

    # ------------------------------------------------------------------------------ makers' side

    def join(self, maker: int) -> None:
        """A maker's thread begins."""
        with self._change():
            self._makers.add(maker)

    def fail(self, error: BaseException) -> None:
        """Something of a maker's has failed: raised where the trainer is."""
        with self._change():
            self._failure = self._failure or error

    def leave(self, maker: int, error: BaseException | None = None) -> None:
        """A maker's thread has ended; its error, if it failed, is raised where the trainer is."""
        with self._change():
            self._makers.discard(maker)
            self._left.add(maker)
            self._failure = self._failure or error

    def begin(self, maker: int, version: int, waits: bool = True) -> Order | None:
        """What the maker makes next, with weights of that version; waits for its turn.

        None: there are newer weights to take first, it is over, the maker has left, or there is
        nothing now and it does not wait.
        """
        with self._changed:
            while True:
                if self._closed or self.version > version or maker in self._left:
                    self._idle.discard(maker)
                    return None
                piece = None if self._paused else self._next_piece(maker, version)
                if piece is not None:
                    self._idle.discard(maker)
                    return self._hand_out(piece, maker, version)
                if not waits:
                    return None
                if maker not in self._idle:
                    self._idle.add(maker)
                    self._changed.notify_all()
                with self._activity.of(f"maker {maker}").waiting(self._why(version)):
                    self._changed.wait(LOOK_S)

    def put(self, experience: Experience) -> None:
        """A piece is made; where the buffer is full and evicts, the oldest makes room."""
        with self._change():
            del self._in_flight[experience.piece.number]
            self.ledger.move(experience.uids, QUEUED)
            self._ready.append(experience)
            while self._settings.evicts and self._queued() > self._settings.limit:
                self._drop(self._ready[0], "pushed out of the full buffer")

    def lost(self, maker: int, begun: Mapping[int, Submission]) -> int:
        """What this maker was making is to be made again, by whoever may; gives the samples lost.

        Of pieces in `begun`, by number, that is the part which is not there.
        """
        with self._change():
            orders = [order for who, order in self._in_flight.values() if who == maker]
            kept, num_lost = {}, 0
            for order in orders:
                number = order.piece.number
                del self._in_flight[number]
                num_lost += order.piece.num_samples
                if number in begun:
                    kept[number] = Begun(maker, order.version, begun[number])
                    num_lost -= begun[number].num_there
                self.ledger.drop(order.uids, LOST, kept[number].uids if number in kept else ())
            self.stream.hand_back([order.piece for order in orders], kept)
            return num_lost

    # ---------------------------------------------------------------------------- trainer's side

    def take(
        self,
        num_samples: int,
        attempt: int = 0,
        rest_of_version: int = 0,
        rest_of_run: int | None = None,
    ) -> list[Experience]:
        """Experiences of so many samples, as the sampler chooses; waits for them.

        Raises what a maker's thread raised, `StalledError` where nobody can go on, and
        `EndOfSamples` where there is no more.
        """
        with self._changed, self._activity.of("trainer").waiting("samples"):
            self._demand = Demand(num_samples, attempt, rest_of_version, rest_of_run)
            self._look_again()
            try:
                return self._wait_for_batch(num_samples)
            finally:
                # before the lock is free: what was taken is no longer asked for
                self._demand = Demand(0, 0, rest_of_version, rest_of_run)
                self._look_again()

    def drop_taken(self, uids: Iterable[str], reason: str) -> None:
        """Groups that were taken and are not trained on."""
        with self._changed:
            self.ledger.drop(uids, reason)

    def trained(self, rows: Mapping[str, list[tuple[int, int]]]) -> None:
        """Groups were trained on: uid -> trainer rank and version of each of its samples."""
        with self._changed:
            for uid, samples in rows.items():
                ranks, versions = zip(*samples, strict=True)
                self.ledger.trained(uid, ranks, versions, self.version)
        self.check()

    def check(self) -> None:
        """The ledger adds up, and has every group where it is in fact."""
        with self._changed:
            queued = [uid for one in self._ready for uid in one.uids]
            in_flight = [uid for _, order in self._in_flight.values() for uid in order.uids]
            self.ledger.check({QUEUED: queued, IN_FLIGHT: in_flight})

    def publish(self, version: int) -> None:
        """There are weights of that version, which makers take before their next piece."""
        with self._change():
            self.version = version

    def clear(self, reason: str) -> None:
        """Throw away what is queued; limit and settings stay."""
        with self._change():
            for experience in list(self._ready):
                self._drop(experience, reason)

    @contextmanager
    def paused(self, timeout_s: float) -> Iterator[None]:
        """Within, no maker makes anything: those that do have finished their pieces."""
        with self._changed:
            self._paused = True
            while self._in_flight and self._makers and self._failure is None:
                if not self._changed.wait(timeout_s):
                    raise StalledError(f"makers do not come to rest: {self._who_waits()}")
        try:
            yield
        finally:
            with self._change():
                self._paused = False

    def state_dict(self) -> tuple[dict[str, Any], list[Experience]]:
        """Where the prompts stand, the pieces that are being made, the ledger; and what is queued,
        which is not in the first.
        """
        with self._changed:
            being_made = [order.piece for _, order in self._in_flight.values()]
            state = {
                "stream": self.stream.state_dict(being_made),
                "ledger": self.ledger.as_dict(),
                "num_taken": self._num_taken,
            }
            return state, list(self._ready)

    def load_state_dict(
        self, state: dict[str, Any], again: Sequence[Piece], kept: Sequence[Experience]
    ) -> None:
        """Go on from there: of what was queued `again` is made again, `kept` is queued still."""
        with self._change():
            self.stream.load_state_dict(state["stream"])
            self.stream.hand_back(again)
            self.ledger.load_state_dict(state["ledger"], MADE_AGAIN)
            self._num_taken = state["num_taken"]
            for experience in kept:
                per_prompt = experience.num_samples // len(experience.uids)
                self.ledger.restore(experience.maker, experience.uids, per_prompt, MADE_AGAIN)
                self._ready.append(experience)

    def close(self) -> None:
        """Nothing is begun any more; makers' threads end."""
        with self._change():
            self._closed = True

    @property
    def is_paused(self) -> bool:
        """Whether makers are to rest."""
        return self._paused

    @property
    def is_closed(self) -> bool:
        """Whether nothing is begun any more."""
        return self._closed

    @property
    def depth(self) -> int:
        """Samples that are queued."""
        with self._changed:
            return self._queued()

    @property
    def ready(self) -> list[Experience]:
        """What is queued, in the order in which it came."""
        with self._changed:
            return list(self._ready)

    def in_flight(self, maker: int | None = None) -> list[Piece]:
        """Pieces that are being made, by one maker or by any."""
        with self._changed:
            return [o.piece for who, o in self._in_flight.values() if maker in (None, who)]

    # ----------------------------------------------------------------------------------- inside

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._changed:
            yield
            self._look_again()

    def _look_again(self) -> None:
        """Whoever waits looks whether it can go on now."""
        self._idle.clear()
        self._changed.notify_all()

    def _wait_for_batch(self, num_samples: int) -> list[Experience]:
        stall = StallWarning(self._settings.stall_s, self._activity.who_waits)
        while True:
            if self._failure is not None:
                raise self._failure
            choice = self._choose(num_samples)
            for experience, reason in choice.dropped:
                self._drop(experience, reason)
                self._look_again()
            if choice.taken:
                for experience in choice.taken:
                    self._ready.remove(experience)
                    self.ledger.move(experience.uids, TAKEN)
                self._num_taken += 1
                return choice.taken

            self._raise_if_nobody_can_go_on(num_samples)
            self._changed.wait(LOOK_S)
            stall.look()

    def _choose(self, num_samples: int) -> Choice:
        """What the sampler chooses: for each trainer rank that has makers of its own, its share."""
        ranks = self.stream.ranks
        whole = Choice()
        for rank in ranks:
            choice = chosen(self._sampler, self._stock(rank, num_samples // len(ranks)))
            whole.dropped += choice.dropped
            if not choice.taken:
                return Choice([], whole.dropped)
            whole.taken += choice.taken
        return whole

    def _stock(self, rank: int, num_samples: int) -> Stock:
        """What there is for one trainer rank, or for any."""
        # one past the highest piece that was ever begun and is still open
        horizon = max([one.piece.number for one in self._ready] + [*self._in_flight, -1]) + 1
        coming: list[tuple[Piece, int | None]] = []
        coming += [(order.piece, order.version) for _, order in self._in_flight.values()]
        coming += [(piece, None) for piece in self.stream.waiting if piece.number < horizon]
        return Stock(
            ready=tuple(one for one in self._ready if one.piece.rank == rank),
            coming=[(piece, version) for piece, version in coming if piece.rank == rank],
            num_samples=num_samples,
            version=self.version,
            max_staleness=self.pacing.max_staleness,
            samples_per_version=self.pacing.samples_per_version // len(self.stream.ranks),
            rest_of_version=self._demand.rest_of_version // len(self.stream.ranks),
            seed=(self._settings.seed, self._num_taken),
            window=self._settings.window,
        )

    def _raise_if_nobody_can_go_on(self, num_samples: int) -> None:
        if self._in_flight or self._idle < self._makers:
            return
        if self.stream.has_ended:
            size = f", a batch has {num_samples}" if num_samples else ""
            raise EndOfSamples(f"the prompts have ended: {self._queued()} samples are left{size}")
        who = self._who_waits() if self._makers else None
        raise StalledError.of_trainer(num_samples, self._queued(), who)

    def _next_piece(self, maker: int, version: int) -> Piece | None:
        """The first piece that this maker may make, if there is room for it."""
        piece = self.stream.offer(maker)
        return piece if piece is not None and self._has_room(piece, version) else None

    def _has_room(self, piece: Piece, version: int) -> bool:
        """Whether a piece that weights of this version make may be open, too."""
        opened = [one.piece for one in self._ready]
        opened += [order.piece for _, order in self._in_flight.values()]
        opened += [piece, *self.stream.waiting_before(piece)]
        if not self._settings.evicts and num_samples_of(opened) > self._settings.limit:
            return False
        bound = self.pacing.bound(self._demand, self.version - version)
        of_rank = [one for one in opened if one.rank == piece.rank]
        return num_samples_of(of_rank) <= bound // len(self.stream.ranks)

    def _hand_out(self, piece: Piece, maker: int, version: int) -> Order:
        begun = self.stream.hand_out(piece)
        if begun is not None and not self._has_room(piece, begun.version):
            self.ledger.drop_kept(begun.maker, begun.submission.num_there, TOO_OLD)
            begun = None
        prompts = self.stream.prompts(piece)
        uids = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
        self.ledger.begin(maker, uids, piece.num_samples // len(uids))
        oldest = version if begun is None else min(version, begun.version)
        order = Order(piece, prompts, uids, oldest, self._demand.attempt, begun)
        self._in_flight[piece.number] = maker, order
        return order

    def _drop(self, experience: Experience, reason: str) -> None:
        self._ready.remove(experience)
        self.ledger.drop(experience.uids, reason)

    def _queued(self) -> int:
        return num_samples_of([one.piece for one in self._ready])

    def _why(self, version: int) -> str:
        """What a maker with weights of that version waits for, in words."""
        if self._paused:
            return "the end of a validation or a checkpoint"
        return (
            f"room: {self._queued()} samples are queued, and weights of version {version} may be "
            f"at most {self.pacing.max_staleness} versions old"
        )

    def _who_waits(self) -> str:
        return "; ".join(self._activity.who_waits())


logger = logging.getLogger(__name__)


class StalledError(VerlLikeError, RuntimeError):
    """Makers and trainer wait for each other; the message says who waits for what."""

    @classmethod
    def of_trainer(cls, num_samples: int, num_queued: int, who_waits: str | None) -> StalledError:
        """The trainer waits for so many; `who_waits` is None where no maker is left."""
        where = f"the trainer waits for {num_samples} samples, {num_queued} are queued, "
        if who_waits is None:
            return cls(where + "and there is no maker left.")
        return cls(
            f"{where}nothing is being made, and every maker waits: {who_waits}. A larger "
            "detached.limit or detached.max_staleness, or another sampler, would let them go on."
        )


class StallWarning:
    """Says who waits for whom, each time that a wait has lasted so many seconds more."""

    def __init__(self, every_s: float, who_waits: Callable[[], Sequence[str]]) -> None:
        """The wait begins."""
        self._every_s, self._who_waits = every_s, who_waits
        self._began = self._warned = time.monotonic()

    def look(self) -> None:
        """Warn if it is time."""
        now = time.monotonic()
        if now - self._warned > self._every_s:
            logger.warning(
                "no batch for %.0f s: %s", now - self._began, "; ".join(self._who_waits())
            )
            self._warned = now


class EndOfSamples(Exception):
    """No maker has prompts left, and no batch can be filled."""


class ToldToStop(Exception):
    """The run is to stop, while a maker without which it gets no batch waited for a node."""
