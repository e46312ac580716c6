"""The bounded queue between makers, which generate, and the trainer, which learns.

    experience = buffer.begin(maker, weights)    # a maker's thread; waits for room and its turn
    buffer.put(experience)                       # with its samples
    experiences = buffer.take(Demand(16))        # the trainer; waits for a batch
    buffer.publish(version)                      # there are newer weights

`detached.limit` and the largest age of samples bound how many samples may be open, that is, queued
or in generation. One lock guards the buffer and the log of samples.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from trainer.detached.activity import Activity
from trainer.detached.config import DetachedConfig, open_at_once, samples_per_batch
from trainer.detached.rounds import Demand
from trainer.detached.samplers import (
    SAMPLERS,
    Choice,
    Experience,
    Stock,
    chosen,
    num_samples_of,
)
from trainer.detached.topology import ANY_RANK, by_first
from trainer.loop import EndOfSamples
from trainer.roadside.sample_log import (
    IN_FLIGHT,
    QUEUED,
    TAKEN,
    SampleLog,
    tokens_by_sample,
    tokens_given_up,
)
from trainer.rollouts.samples import concat_rows, repeat_prompts
from verl_like.batch.protocol import DataProto
from verl_like.errors import VerlLikeError

LOOK_S = 1.0
"""Seconds between two checks of a wait: has it lasted too long, do the trainers live?"""
LOOK_SHARE = 0.05
"""Share of a wait that may go into asking the trainers: thousands of them take long."""
LOST = "lost with its maker"
SAMPLES = "queued_samples"
"""The folder of a checkpoint that holds the queued samples."""
logger = logging.getLogger(__name__)
Found = TypeVar("Found")


class StalledError(VerlLikeError, RuntimeError):
    """Makers and trainer wait for each other; the message says who waits for what."""


class StallWatch:
    """Watches a wait of the trainer: logs who waits for whom, and checks that trainers live."""

    def __init__(
        self, activity: Activity, stall_s: float, check_trainers: Callable[[], None]
    ) -> None:
        """The wait begins now."""
        self._activity, self._stall_s, self._check_trainers = activity, stall_s, check_trainers
        self._began = time.monotonic()
        self._checks_at, self._warns_at = self._began + LOOK_S, self._began + stall_s

    def look(self) -> None:
        """Warn or check if it is time to; raise the error of a lost trainer."""
        now = time.monotonic()
        if now > self._warns_at:
            waits = self._activity.who_waits()
            logger.warning("no batch for %.0f s: %s", now - self._began, waits)
            self._warns_at = now + self._stall_s
        if now > self._checks_at:
            self._check_trainers()
            took = time.monotonic() - now
            self._checks_at = now + max(LOOK_S, took / LOOK_SHARE)


class Loader(Protocol):
    """The part of `trainer.data.prompts.PromptLoader` that the buffer uses."""

    def batch(self, number: int) -> DataProto:
        """The prompts of that batch."""

    def num_prompts(self, number: int) -> int:
        """The number of prompts in that batch; 0 after the last batch."""


class PieceStream:
    """The loader's batches, cut into pieces in the order of the prompts.

    A piece whose maker was lost is handed back, and is handed out again before any later piece. The
    buffer calls the stream under its lock.
    """

    def __init__(self, config: DetachedConfig, loader: Loader) -> None:
        """Trainer ranks with makers of their own get equal parts of every batch."""
        self._loader, self._topology = loader, config.topology
        self._prompts_per_piece = config.piece_size
        self._samples_per_prompt = config.actor_rollout_ref.rollout.n
        self.ranks = self._topology.routed_ranks
        self.waiting: list[Experience] = []
        """Pieces that no maker has, in their order."""
        self._batches: dict[int, DataProto] = {}
        self._next_batch = self._next_number = 0

    @property
    def has_ended(self) -> bool:
        """Whether the loader has no further batch."""
        return self._loader.num_prompts(self._next_batch) == 0

    def offer(self, maker: int) -> Experience | None:
        """The first waiting piece that this maker may make; it stays in the stream.

        None: no prompts are left for this maker.
        """
        while True:
            for piece in self.waiting:
                if piece.rank == ANY_RANK or maker in self._topology.makers_of(piece.rank):
                    return piece
            if self.has_ended:
                return None
            self._cut()

    def hand_back(self, pieces: Iterable[Experience]) -> None:
        """Put these pieces back in their order; they are handed out next."""
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
        """The number of samples in that batch."""
        return self._loader.num_prompts(batch) * self._samples_per_prompt

    def state_dict(self, being_made: Iterable[Experience] = ()) -> dict[str, Any]:
        """The stream's place, with the pieces that a resume has to generate again."""
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
        """Cut the loader's next batch into pieces."""
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
    """Weights that a maker holds or may take; greater is newer."""

    num_swaps: int
    """Swaps within a version: a validation may use averaged weights."""
    version: int


class ExperienceBuffer:
    """A queue with several makers' threads at one end and the trainer at the other."""

    def __init__(
        self,
        config: DetachedConfig,
        loader: Loader,
        activity: Activity,
        check_trainers: Callable[[], None] = lambda: None,
    ) -> None:
        """While the trainer waits, `check_trainers` raises if one of its processes is gone."""
        self.settings, self._seed = config.detached, config.trainer.seed
        self._samples_per_version = config.detached.update_steps * samples_per_batch(config)
        self._limit, self._evicts = open_at_once(config), config.detached.when_full != "wait"
        self._sampler = SAMPLERS.look_up(config.detached.sampler)()
        self.stream = PieceStream(config, loader)
        self._activity, self._check_trainers = activity, check_trainers
        lock = threading.RLock()
        self.log = SampleLog(lock)
        self._changed = threading.Condition(lock)
        """The trainer waits on it."""
        self._has_turn = threading.Condition(lock)
        """Makers wait on it: a finished piece gives no maker room, so it wakes none."""
        self._ready: list[Experience] = []
        self._queued_at_save: list[Experience] = []
        self._in_flight: dict[int, Experience] = {}
        """Number -> piece that a maker is generating."""
        self._to_validate: list[Experience] = []
        self._makers: set[int] = set()
        self._idle: set[int] = set()
        self.weights = Weights(0, 0)
        """The newest weights that makers can take."""
        self._demand = Demand()
        self._num_taken = 0
        self._failure: BaseException | None = None
        self.is_closed = self.is_paused = False

    @property
    def version(self) -> int:
        """The version of the newest weights."""
        return self.weights.version

    # ------------------------------------------------------------------------------ makers' side

    def join(self, maker: int) -> None:
        """A maker's thread begins."""
        with self._change():
            self._makers.add(maker)

    def leave(self, maker: int, error: BaseException | None = None) -> None:
        """A maker's thread has ended. If it failed, its error is raised in the trainer's thread."""
        with self._change():
            self._makers.discard(maker)
            self._failure = self._failure or error

    def begin(self, maker: int, weights: Weights, waits: bool = True) -> Experience | None:
        """The next piece for a maker that holds these weights; waits for its turn.

        None: the maker has to take newer weights first, the run is over, or nothing is to do now
        and the maker does not wait.
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
        """Queue a finished piece; with `when_full=evict_oldest` a full buffer drops the oldest."""
        assert experience.samples is not None, "it is finished"
        tokens = tokens_by_sample(experience.samples)
        given_up = tokens_given_up(experience.samples)
        with self._changed:
            del self._in_flight[experience.number]
            experience.rows = None
            self._changed.notify_all()
            if experience.is_validation:
                return
            self.log.receive(tokens, given_up)
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
                    self.log.drop(one.names, LOST)
            self.stream.hand_back(one for one in lost if not one.is_validation)
            self._to_validate += [one for one in lost if one.is_validation]
            return num_samples_of(lost)

    # ---------------------------------------------------------------------------- trainer's side

    def take(self, demand: Demand) -> list[Experience]:
        """The pieces of a batch, as the sampler chooses them; waits for them.

        Raises the error of a maker's thread, `StalledError` where nobody can go on, and
        `EndOfSamples` where no samples are left.
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
        """The samples of a validation's rows; each of these makers generates a part.

        Call it within `paused`. The part of a lost maker goes to its successor or another maker.
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

    def check(self) -> None:
        """Raise if the log does not add up, or has a group elsewhere than the buffer."""
        with self._changed:
            queued = [uid for one in self._ready for uid in one.uids]
            in_flight = [uid for one in self._in_flight.values() for uid in one.uids]
            self.log.check({QUEUED: queued, IN_FLIGHT: in_flight})

    def publish(self, version: int) -> None:
        """Announce weights of that version, which makers take before their next piece."""
        with self._change():
            swaps = self.weights.num_swaps + (version == self.version)
            self.weights = Weights(swaps, version)

    @contextmanager
    def paused(self, timeout_s: float) -> Iterator[None]:
        """Let makers finish their pieces; within the block they only validate."""
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

    def state_dict(self) -> dict[str, Any]:
        """The place in the prompts, the log, and what is queued, without its samples."""
        with self._changed:
            self._queued_at_save = list(self._ready)
            return {
                "stream": self.stream.state_dict(self._in_flight.values()),
                "ledger": self.log.state_dict(),
                "num_taken": self._num_taken,
                "queued": [piece.state_dict() for piece in self._ready],
            }

    def write_samples(self, checkpoint: Path) -> None:
        """With `detached.on_resume=restore`, write the samples queued at the last `state_dict`."""
        if self.settings.on_resume != "restore":
            return
        (checkpoint / SAMPLES).mkdir()
        for piece in self._queued_at_save:
            assert piece.samples is not None, "a queued piece has samples"
            piece.samples.save_to_disk(checkpoint / SAMPLES / f"{piece.number}.safetensors")

    def load_state_dict(self, state: dict[str, Any], checkpoint: Path | None) -> None:
        """Go on from there. Queued pieces whose samples are not restored are generated again."""
        restores = self.settings.on_resume == "restore"
        folder = checkpoint / SAMPLES if restores and checkpoint is not None else None
        queued = [Experience.from_state(facts, folder) for facts in state["queued"]]
        with self._change():
            self.stream.load_state_dict(state["stream"])
            self.stream.hand_back(piece for piece in queued if piece.samples is None)
            self.log.load_state_dict(state["ledger"])
            self._num_taken = state["num_taken"]
            self._ready = [piece for piece in queued if piece.samples is not None]
            for piece in self._ready:
                assert piece.samples is not None, "a queued piece has samples"
                self.log.restore(piece.maker, tokens_by_sample(piece.samples))

    def close(self) -> None:
        """Hand out no more pieces, so that makers' threads end."""
        with self._change():
            self.is_closed = True

    @property
    def makers(self) -> list[int]:
        """The numbers of the makers whose threads run, sorted."""
        with self._changed:
            return sorted(self._makers)

    @property
    def depth(self) -> int:
        """The number of queued samples."""
        return num_samples_of(self.ready)

    @property
    def ready(self) -> list[Experience]:
        """The queued pieces, in the order in which they came."""
        with self._changed:
            return list(self._ready)

    def in_flight(self, maker: int | None = None) -> list[Experience]:
        """The pieces that one maker is generating, or any maker."""
        with self._changed:
            return [one for one in self._in_flight.values() if maker in (None, one.maker)]

    # ----------------------------------------------------------------------------------- inside

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._changed:
            yield
            self._look_again()

    def _look_again(self) -> None:
        """Wake everybody who waits."""
        self._idle.clear()
        self._changed.notify_all()
        self._has_turn.notify_all()

    def _wait_for(self, found: Callable[[], Found]) -> Found:
        """Wait until `found` returns something, and return it."""
        watch = StallWatch(self._activity, self.settings.stall_s, self._check_trainers)
        while True:
            if self._failure is not None:
                raise self._failure
            if result := found():
                return result
            self._raise_if_nobody_can_go_on()
            self._changed.wait(LOOK_S)
            watch.look()

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
        """A batch as the sampler chooses it, with a share for each trainer rank with makers."""
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
            self.log.move(experience.names, TAKEN)
        self._num_taken += bool(whole.taken)
        return whole.taken

    def _stocks(self, num_samples: int) -> Iterator[Stock]:
        """The pieces for each trainer rank with makers of its own, or for any rank."""
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
        """Hand out the first piece that this maker may make, if there is room for it."""
        if self.is_paused:
            mine = [p for p in self._to_validate if p.maker == maker or p.maker not in self._makers]
            if not mine:
                return None
            piece = mine[0]
            self._to_validate.remove(piece)
        else:
            offered = self.stream.offer(maker)
            if offered is None or not self._has_room(offered, version):
                return None
            piece = offered
            self.stream.waiting.remove(piece)
            piece.version, piece.attempt = version, self._demand.attempt
            piece.rows = self.stream.rows(piece)
            self.log.begin(maker, piece.names)
        piece.maker = maker
        self._in_flight[piece.number] = piece
        self._idle.discard(maker)
        return piece

    def _has_room(self, piece: Experience, version: int) -> bool:
        """Return whether there is room for one more piece, generated with this version."""
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
        self.log.drop(experience.names, reason)
