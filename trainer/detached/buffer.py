"""The experience buffer: what makers have made and trainers have not yet taken, bounded.

    experience = buffer.begin(maker, weights)    # a maker's thread; waits for room, and its turn
    buffer.put(experience)                       # with its samples
    experiences = buffer.take(Demand(16))        # the trainer; waits for a batch
    buffer.publish(version)                      # there are newer weights

It bounds samples that are open, queued or being made: by `detached.limit`, and by how old they may
grow. One lock guards all of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from trainer.detached.activity import Activity
from trainer.detached.config import DetachedConfig, open_at_once, samples_per_batch
from trainer.detached.ledger import IN_FLIGHT, LOST, QUEUED, TAKEN, Ledger
from trainer.detached.samplers import (
    SAMPLERS,
    Choice,
    Experience,
    Stock,
    chosen,
    num_samples_of,
    tokens_by_uid,
)
from trainer.detached.topology import ANY_RANK, by_first
from trainer.ppo.tokens import tokens_given_up
from trainer.rollouts.samples import concat_rows, repeat_prompts
from verl_like.batch.protocol import DataProto
from verl_like.errors import VerlLikeError

LOOK_S = 1.0
"""How often a wait looks whether it has lasted too long, and whether the trainers are there."""
LOOK_SHARE = 0.05
"""Of its time that a wait may look for the trainers: thousands of them take long to ask."""
logger = logging.getLogger(__name__)
Found = TypeVar("Found")


class StalledError(VerlLikeError, RuntimeError):
    """Makers and trainer wait for each other; the message says who waits for what."""


class EndOfSamples(Exception):
    """No maker has prompts left, and no batch can be filled."""


class Loader(Protocol):
    """What is used of a `trainer.data.prompts.PromptLoader`."""

    def batch(self, number: int) -> DataProto:
        """The prompts of that batch."""

    def num_prompts(self, number: int) -> int:
        """How many they are; 0 after the last."""


class PieceStream:
    """The loader's batches, cut into pieces in the order of the prompts.

    A piece that its maker lost is handed back, and handed out again before any later one. Not
    thread-safe: the buffer calls it under its lock.
    """

    def __init__(self, config: DetachedConfig, loader: Loader) -> None:
        """A batch is cut into equal parts for the trainer ranks with makers of their own."""
        self._loader, self._topology = loader, config.topology
        self._prompts_per_piece = config.piece_size
        self._samples_per_prompt = config.actor_rollout_ref.rollout.n
        self.ranks = self._topology.routed_ranks
        self.waiting: list[Experience] = []
        """Pieces that are cut and that nobody makes, in their order."""
        self._batches: dict[int, DataProto] = {}
        self._next_batch = self._next_number = 0

    @property
    def has_ended(self) -> bool:
        """Whether the loader has no further batch."""
        return self._loader.num_prompts(self._next_batch) == 0

    def offer(self, maker: int) -> Experience | None:
        """The first piece that is nobody's and that this maker may make; it stays in the stream.

        None: no prompts are left for it.
        """
        while True:
            for piece in self.waiting:
                if piece.rank == ANY_RANK or maker in self._topology.makers_of(piece.rank):
                    return piece
            if self.has_ended:
                return None
            self._cut()

    def hand_back(self, pieces: Iterable[Experience]) -> None:
        """Pieces that are not made: the next ones to be handed out, in their order."""
        self.waiting = sorted([*self.waiting, *pieces], key=lambda piece: piece.number)

    def rows(self, piece: Experience) -> DataProto:
        """A row for each sample of a piece."""
        if piece.batch not in self._batches:
            # pieces come batch by batch: two are enough for those that overlap
            self._batches = dict(list(self._batches.items())[-1:])
            self._batches[piece.batch] = self._loader.batch(piece.batch)
        prompts = self._batches[piece.batch][piece.start : piece.stop]
        piece.uids = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
        return repeat_prompts(prompts, self._samples_per_prompt)

    def num_samples(self, batch: int) -> int:
        """Samples of the loader's batch of that number."""
        return self._loader.num_prompts(batch) * self._samples_per_prompt

    def state_dict(self, being_made: Iterable[Experience] = ()) -> dict[str, Any]:
        """Where the stream stands, with pieces that would have to be made again."""
        waiting = sorted([*self.waiting, *being_made], key=lambda piece: piece.number)
        return {
            "next_batch": self._next_batch,
            "next_number": self._next_number,
            "waiting": [piece.place() for piece in waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._next_batch, self._next_number = state["next_batch"], state["next_number"]
        self.waiting = [Experience(**place) for place in state["waiting"]]

    def _cut(self) -> None:
        """The pieces of the loader's next batch."""
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        num_prompts, num_ranks = self._loader.num_prompts(batch), len(self.ranks)
        for place, rank in enumerate(self.ranks):
            last = (place + 1) * num_prompts // num_ranks
            for start in range(place * num_prompts // num_ranks, last, self._prompts_per_piece):
                stop = min(start + self._prompts_per_piece, last)
                piece = Experience(
                    number=self._next_number,
                    num_samples=(stop - start) * self._samples_per_prompt,
                    batch=batch,
                    start=start,
                    stop=stop,
                    rank=rank,
                )
                self.waiting.append(piece)
                self._next_number += 1


class Weights(NamedTuple):
    """What makers hold, or may take; greater is newer."""

    num_swaps: int
    """How often others of the same version have come, such as the averaged ones of a validation."""
    version: int


@dataclass(frozen=True)
class Demand:
    """What the trainer waits for, if it does, and what it will ask for later."""

    num_samples: int = 0
    attempt: int = 0
    rest_of_version: int = 0
    """Fresh samples after these, before the next version of the weights."""
    rest_of_run: int | None = None
    """Fresh samples after these; None: nobody can say."""


class ExperienceBuffer:
    """Between makers' threads and the trainer's."""

    def __init__(
        self,
        config: DetachedConfig,
        loader: Loader,
        activity: Activity,
        check_trainers: Callable[[], None] = lambda: None,
    ) -> None:
        """Empty, with weights of version 0. While the trainer waits, `check_trainers` raises if one
        of its processes is gone.
        """
        self.settings, self._seed = config.detached, config.trainer.seed
        self._samples_per_version = config.detached.update_steps * samples_per_batch(config)
        self._limit, self._evicts = open_at_once(config), config.detached.when_full != "wait"
        self._sampler = SAMPLERS.look_up(config.detached.sampler)()
        self.stream, self.ledger = PieceStream(config, loader), Ledger()
        self._activity, self._check_trainers = activity, check_trainers
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        """The trainer's wait."""
        self._has_turn = threading.Condition(lock)
        """The makers': a finished piece gives none of them room, and does not wake them."""
        self._ready: list[Experience] = []
        self._in_flight: dict[int, Experience] = {}
        """By number, what makers are making."""
        self._to_validate: list[Experience] = []
        self._makers: set[int] = set()
        self._idle: set[int] = set()
        self.weights = Weights(0, 0)
        """The newest that makers can have."""
        self._demand = Demand()
        self._num_taken = 0
        self._failure: BaseException | None = None
        self.is_closed = self.is_paused = False

    @property
    def version(self) -> int:
        """Of the newest weights."""
        return self.weights.version

    # ------------------------------------------------------------------------------ makers' side

    def join(self, maker: int) -> None:
        """A maker's thread begins."""
        with self._change():
            self._makers.add(maker)

    def leave(self, maker: int, error: BaseException | None = None) -> None:
        """A maker's thread has ended; its error, if it failed, is raised where the trainer is."""
        with self._change():
            self._makers.discard(maker)
            self._failure = self._failure or error

    def begin(self, maker: int, weights: Weights, waits: bool = True) -> Experience | None:
        """What the maker makes next, with these weights; waits for its turn.

        None: there are newer weights to take first, it is over, or there is nothing now and it does
        not wait.
        """
        most = f"at most {self.settings.max_staleness} versions old"
        what = f"room: weights of version {weights.version} may be {most}"
        with self._changed, self._activity.of(f"maker {maker}").waiting(what):
            while not (self.is_closed or self.weights > weights):
                experience = self._begin_next(maker, weights.version)
                if experience is not None or not waits:
                    return experience
                if maker not in self._idle:
                    self._idle.add(maker)
                    self._changed.notify_all()
                self._has_turn.wait(LOOK_S)
        return None

    def put(self, experience: Experience) -> None:
        """Accept a finished experience; a full buffer that evicts drops its oldest ones."""
        tokens, given_up = tokens_by_uid(experience), tokens_given_up(experience.samples)
        with self._changed:
            del self._in_flight[experience.number]
            experience.rows = None
            self._changed.notify_all()
            if experience.is_validation:
                return
            self.ledger.queue(tokens, given_up)
            self._ready.append(experience)
            while self._evicts and num_samples_of(self._ready) > self._limit:
                self._drop(self._ready[0], "pushed out of the full buffer")
                self._look_again()

    def lost(self, maker: int) -> int:
        """Hand back the pieces of a lost maker, to be generated again; return their samples."""
        with self._change():
            lost = self.in_flight(maker)
            for one in lost:
                del self._in_flight[one.number]
                if not one.is_validation:
                    self.ledger.drop(one.uids, LOST)
            self.stream.hand_back(one for one in lost if not one.is_validation)
            self._to_validate += [one for one in lost if one.is_validation]
            return num_samples_of(lost)

    # ---------------------------------------------------------------------------- trainer's side

    def take(self, demand: Demand) -> list[Experience]:
        """Experiences of so many samples, as the sampler chooses; waits for them.

        Raises what a maker's thread raised, `StalledError` where nobody can go on, and
        `EndOfSamples` where there is no more.
        """
        with self._changed, self._activity.of("trainer").waiting("samples"):
            self._demand = demand
            self._look_again()
            try:
                return self._wait_for(lambda: self._take_chosen(demand.num_samples))
            finally:
                # before the lock is free: what was taken is no longer asked for
                rest = demand.rest_of_version, demand.rest_of_run
                self._demand = Demand(0, 0, *rest)
                self._look_again()

    def validate(self, rows: DataProto, makers: Sequence[int]) -> DataProto:
        """The samples of rows beside the run's own, of which each of these makers makes a part.

        Within `paused`. What a maker loses is made by itself, started anew, or by any other.
        """
        makers = makers[: len(rows)]
        parts = [
            Experience(number=-1 - place, num_samples=len(part), maker=makers[place], rows=part)
            for place, part in enumerate(rows.chunk(len(makers)))
        ]
        with self._changed:
            self._to_validate = list(parts)
            self._look_again()
            self._wait_for(lambda: all(part.samples is not None for part in parts))
        return concat_rows([part.samples for part in parts if part.samples is not None])

    def drop_taken(self, uids: Iterable[str], reason: str) -> None:
        """Groups that were taken and are not trained on."""
        with self._changed:
            self.ledger.drop(uids, reason)

    def trained(
        self,
        rows: Mapping[str, Sequence[tuple[int, int]]],
        tokens: int,
        left_out: Mapping[str, int],
    ) -> None:
        """Groups were trained on: uid -> trainer rank and version of each of its samples.

        So many of their `tokens`, and others not, by reason.
        """
        with self._changed:
            for uid, samples in rows.items():
                ranks, versions = zip(*samples, strict=True)
                self.ledger.trained(uid, ranks, versions, self.version)
            self.ledger.tokens_trained(tokens, left_out)
        self.check()

    def check(self) -> None:
        """The ledger adds up, and has every group where it is in fact."""
        with self._changed:
            queued = [uid for one in self._ready for uid in one.uids]
            in_flight = [uid for one in self._in_flight.values() for uid in one.uids]
            self.ledger.check({QUEUED: queued, IN_FLIGHT: in_flight})

    def publish(self, version: int) -> None:
        """There are weights of that version, which makers take before their next piece."""
        with self._change():
            swaps = self.weights.num_swaps + (version == self.version)
            self.weights = Weights(swaps, version)

    def clear(self, reason: str) -> None:
        """Throw away what is queued; limit and settings stay."""
        with self._change():
            for experience in list(self._ready):
                self._drop(experience, reason)

    @contextmanager
    def paused(self, timeout_s: float) -> Iterator[None]:
        """Within, makers only validate: what they were making is made."""
        with self._changed:
            self.is_paused = True
            while self._in_flight and self._makers and self._failure is None:
                if not self._changed.wait(timeout_s):
                    raise StalledError(f"makers do not come to rest: {self._activity.who_waits()}")
        try:
            yield
        finally:
            with self._change():
                self.is_paused = False

    def state_dict(self) -> tuple[dict[str, Any], list[Experience]]:
        """Where the prompts stand, the pieces that are being made, the ledger; and what is queued,
        which is not in the first.
        """
        with self._changed:
            state = {
                "stream": self.stream.state_dict(self._in_flight.values()),
                "ledger": self.ledger.as_dict(),
                "num_taken": self._num_taken,
            }
            return state, list(self._ready)

    def load_state_dict(self, state: dict[str, Any], queued: Sequence[Experience]) -> None:
        """Go on from there: what was queued still is, or is made again if its samples are gone."""
        with self._change():
            self.stream.load_state_dict(state["stream"])
            self.stream.hand_back(one for one in queued if one.samples is None)
            self.ledger.load_state_dict(state["ledger"])
            self._num_taken = state["num_taken"]
            self._ready = [one for one in queued if one.samples is not None]
            for one in self._ready:
                size = one.num_samples // len(one.uids)
                self.ledger.restore(one.maker, tokens_by_uid(one), size)

    def close(self) -> None:
        """Begin no more experiences, so that makers' threads end."""
        with self._change():
            self.is_closed = True

    @property
    def makers(self) -> list[int]:
        """The numbers of the makers whose threads run, sorted."""
        with self._changed:
            return sorted(self._makers)

    @property
    def depth(self) -> int:
        """Samples that are queued."""
        return num_samples_of(self.ready)

    @property
    def ready(self) -> list[Experience]:
        """What is queued, in the order in which it came."""
        with self._changed:
            return list(self._ready)

    def in_flight(self, maker: int | None = None) -> list[Experience]:
        """What is being made, by one maker or by any."""
        with self._changed:
            return [one for one in self._in_flight.values() if maker in (None, one.maker)]

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
        self._has_turn.notify_all()

    def _wait_for(self, found: Callable[[], Found]) -> Found:
        """What the trainer waits for, once it is there."""
        began = time.monotonic()
        looks_at, warns_at = began + LOOK_S, began + self.settings.stall_s
        while True:
            if self._failure is not None:
                raise self._failure
            if result := found():
                return result
            self._raise_if_nobody_can_go_on()
            self._changed.wait(LOOK_S)
            now = time.monotonic()
            if now > warns_at:
                logger.warning("no batch for %.0f s: %s", now - began, self._activity.who_waits())
                warns_at = now + self.settings.stall_s
            if now > looks_at:
                self._check_trainers()
                took = time.monotonic() - now
                looks_at = now + max(LOOK_S, took / LOOK_SHARE)

    def _raise_if_nobody_can_go_on(self) -> None:
        if self._in_flight or self._idle < self._makers:
            return
        wanted, queued = self._demand.num_samples, num_samples_of(self._ready)
        if self.stream.has_ended and not self.is_paused:
            size = f", a batch has {wanted}" if wanted else ""
            raise EndOfSamples(f"the prompts have ended: {queued} samples are left{size}")
        where = f"the trainer waits for {wanted} samples, {queued} are queued, "
        if not self._makers:
            raise StalledError(where + "and there is no maker left.")
        raise StalledError(
            f"{where}nothing is being made, and every maker waits: {self._activity.who_waits()}. A "
            "larger detached.limit or detached.max_staleness, or another sampler, would let them "
            "go on."
        )

    def _take_chosen(self, num_samples: int) -> list[Experience]:
        """A batch, as the sampler chooses it: for each trainer rank with makers its share."""
        whole = Choice()
        for stock in self._stocks(num_samples):
            choice = chosen(self._sampler, stock)
            whole.dropped += choice.dropped
            if not choice.taken:
                whole.taken = []
                break
            whole.taken += choice.taken
        for experience, reason in whole.dropped:
            self._drop(experience, reason)
            self._look_again()
        for experience in whole.taken:
            self._ready.remove(experience)
            self.ledger.move(experience.uids, TAKEN)
        self._num_taken += bool(whole.taken)
        return whole.taken

    def _stocks(self, num_samples: int) -> Iterator[Stock]:
        """What there is for each trainer rank with makers of its own, or for any."""
        ranks = self.stream.ranks
        # one past the highest piece that was ever begun and is still open
        horizon = max([one.number for one in self._ready] + [*self._in_flight, -1]) + 1
        ready = by_first((one.rank, one) for one in self._ready)
        coming = by_first((one.rank, one) for one in self._in_flight.values())
        lost = by_first((p.rank, p) for p in self.stream.waiting if p.number < horizon)
        for rank in ranks:
            yield Stock(
                ready=ready.get(rank, ()),
                coming=coming.get(rank, ()),
                lost=lost.get(rank, ()),
                num_samples=num_samples // len(ranks),
                version=self.version,
                max_staleness=self.settings.max_staleness,
                samples_per_version=self._samples_per_version // len(ranks),
                rest_of_version=self._demand.rest_of_version // len(ranks),
                seed=(self._seed, self._num_taken),
                window=self.settings.window,
            )

    def _begin_next(self, maker: int, version: int) -> Experience | None:
        """The first piece that this maker may make and for which there is room, handed out."""
        if self.is_paused:
            mine = [p for p in self._to_validate if p.maker == maker or p.maker not in self._makers]
            if not mine:
                return None
            piece = mine[0]
            self._to_validate.remove(piece)
        else:
            found = self.stream.offer(maker)
            if found is None or not self._has_room(found, version):
                return None
            piece = self._hand_out(found, maker, version)
        piece.maker = maker
        self._in_flight[piece.number] = piece
        self._idle.discard(maker)
        return piece

    def _hand_out(self, piece: Experience, maker: int, version: int) -> Experience:
        self.stream.waiting.remove(piece)
        piece.version = version
        piece.rows, piece.attempt = self.stream.rows(piece), self._demand.attempt
        self.ledger.begin(maker, piece.uids, piece.num_samples // len(piece.uids))
        return piece

    def _has_room(self, piece: Experience, version: int) -> bool:
        """Whether a piece that weights of this version make may be open, too."""
        before = [other for other in self.stream.waiting if other.number < piece.number]
        opened = [*self._ready, *self._in_flight.values(), piece, *before]
        if not self._evicts and num_samples_of(opened) > self._limit:
            return False
        demand, lag = self._demand, self.version - version
        ahead = (self.settings.max_staleness - lag) * self._samples_per_version
        room = max(demand.num_samples + demand.rest_of_version + ahead, 0)
        if demand.rest_of_run is not None:
            room = min(room, demand.num_samples + demand.rest_of_run)
        of_rank = [one for one in opened if one.rank == piece.rank]
        return num_samples_of(of_rank) <= room // len(self.stream.ranks)

    def _drop(self, experience: Experience, reason: str) -> None:
        self._ready.remove(experience)
        self.ledger.drop(experience.uids, reason)
