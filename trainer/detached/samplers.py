"""What is queued, and the samplers that choose a batch of it: the names of `detached.sampler`.

    @SAMPLERS.register("newest_first")
    class NewestFirst(Sampler):
        def choose(self, stock: Stock) -> Choice: ...

One of the user's own is found by its dotted path. It is asked whenever something has changed, and
answers with experiences that make exactly one batch, or with none: then the trainer waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.detached.topology import ANY_RANK
from trainer.loop import Metrics
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, VerlLikeError
from verl_like.registry import Registry
from verl_like.signatures import Call, check_call, check_methods
from workers.columns import count_ones


@dataclass(eq=False, kw_only=True)
class Experience:
    """A piece of a batch: consecutive prompts, all samples of which one maker makes.

    Of a validation's rows, which belong to no batch, the number is below 0.
    """

    number: int
    """Its place in the order of the run's prompts."""
    num_samples: int
    batch: int = 0
    start: int = 0
    stop: int = 0
    """It is the prompts `start` to `stop` of the loader's batch."""
    rank: int = ANY_RANK
    """The trainer rank whose makers may make it."""
    maker: int = 0
    """Who makes it, or did."""
    version: int = 0
    """Of the weights that the maker held when it began: no token is older."""
    attempt: int = 0
    """The number of the draw, within its step, that it is made for."""
    uids: list[str] = field(default_factory=list)
    """One for each prompt."""
    rows: DataProto | None = field(default=None, repr=False)
    """The rows of prompts, one for each sample, while it is being made."""
    samples: DataProto | None = field(default=None, repr=False)
    """What the maker has made of it."""
    metrics: Metrics = field(default_factory=dict)
    """Numbers that came with the maker's scores."""

    @property
    def is_validation(self) -> bool:
        """Whether it is a part of a validation's rows."""
        return self.number < 0

    def place(self) -> dict[str, int]:
        """Which prompts it is, as JSON has it."""
        names = "number", "num_samples", "batch", "start", "stop", "rank"
        return {name: getattr(self, name) for name in names}


def tokens_by_uid(experience: Experience) -> dict[str, int]:
    """Drawn tokens of each of its groups, once it is made."""
    found = dict.fromkeys(experience.uids, 0)
    if experience.samples is not None and not experience.is_validation:
        uids = experience.samples.non_tensor_batch["uid"]
        counts = count_ones(experience.samples, "response_mask").tolist()
        for uid, count in zip(uids, counts, strict=True):
            found[str(uid)] += count
    return found


def num_samples_of(experiences: Iterable[Experience]) -> int:
    """Of all of them."""
    return sum(one.num_samples for one in experiences)


@dataclass(frozen=True)
class Stock:
    """What a sampler may look at."""

    ready: Sequence[Experience]
    """In the order in which they came."""
    coming: Sequence[Experience]
    """Those that are being made."""
    num_samples: int
    """Of the batch."""
    version: int
    """Of the trainer's weights."""
    max_staleness: int
    samples_per_version: int
    """Trained on between two versions of the weights."""
    seed: Sequence[int]
    """Of this batch's own randomness: the run's seed and the number of the batch."""
    lost: Sequence[Experience] = ()
    """Those whose maker was lost, and that wait for another one."""
    rest_of_version: int = 0
    """Samples of the batches that come after this one, before the next version."""
    window: int | None = None
    """`detached.window`, where it is set."""

    def room_after(self, made_by: int) -> int:
        """Samples that are trained on after this batch while those of that version may be."""
        versions_left = made_by + self.max_staleness - self.version
        return max(self.rest_of_version + versions_left * self.samples_per_version, 0)


@dataclass
class Choice:
    """The experiences of a batch, in its order; and what is not to be trained on, with reasons."""

    taken: list[Experience] = field(default_factory=list)
    dropped: list[tuple[Experience, str]] = field(default_factory=list)


class Sampler(ABC):
    """Without state of its own: the same stock has the same answer."""

    @abstractmethod
    def choose(self, stock: Stock) -> Choice:
        """The next batch; nothing taken: wait."""


class SamplerError(VerlLikeError, RuntimeError):
    """A sampler's choice is no batch, or one that is too old."""


def chosen(sampler: Sampler, stock: Stock) -> Choice:
    """The sampler's choice, of exactly one batch or nothing, and of nothing too old."""
    choice, name = sampler.choose(stock), type(sampler).__name__
    num_samples = num_samples_of(choice.taken)
    if choice.taken and num_samples != stock.num_samples:
        raise SamplerError(
            f"the sampler {name} took {num_samples} samples for a batch of {stock.num_samples}: "
            "trainer.detached.samplers.up_to takes as many, or none."
        )
    oldest = min((one.version for one in choice.taken), default=stock.version)
    if stock.version - oldest > stock.max_staleness:
        raise SamplerError(
            f"the sampler {name} took samples of version {oldest} for the update of version "
            f"{stock.version}, and detached.max_staleness={stock.max_staleness}: it had left them "
            "over for too long. trainer.detached.samplers.most_urgent_first puts at the "
            "head what a batch must have."
        )
    return choice


def _check(sampler: Any, subject: str) -> None:
    """Refuse what is no class of samplers, or cannot be made without arguments."""
    if not (isinstance(sampler, type) and issubclass(sampler, Sampler)):
        raise ConfigError(
            f"{subject} is no class of samplers: make it a subclass of "
            "trainer.detached.samplers.Sampler."
        )
    check_methods(sampler, Sampler, subject)
    check_call(sampler, subject, Call())


SAMPLERS: Registry[type[Sampler]] = Registry("sampler", _check)


def up_to(experiences: Iterable[Experience], num_samples: int) -> list[Experience]:
    """The first ones that make exactly so many samples; none if they do not."""
    taken: list[Experience] = []
    for experience in experiences:
        if experience.num_samples <= num_samples:
            taken.append(experience)
            num_samples -= experience.num_samples
    return [] if num_samples else taken


def most_urgent_first(stock: Stock, ready: Sequence[Experience]) -> list[Experience] | None:
    """`ready` with those at the head that this batch must have, so that none grows too old.

    For every version, no more samples of it and of older ones may be left over than later batches
    take in time. None: one that this batch must have is still coming.
    """
    head: dict[int, Experience] = {}
    for made_by in sorted({one.version for one in [*ready, *stock.coming]}):
        due = [one for one in ready if one.version <= made_by and one.number not in head]
        coming = [one for one in stock.coming if one.version <= made_by]
        num_left = num_samples_of(due) + num_samples_of(coming)
        for one in due:
            if num_left <= stock.room_after(made_by):
                break
            head[one.number] = one
            num_left -= one.num_samples
        if num_left > stock.room_after(made_by):
            return None
    return [*head.values(), *(one for one in ready if one.number not in head)]


def _in_time(stock: Stock, ready: Sequence[Experience]) -> Choice:
    """The first of these, after those that would be too old for the batch after this one."""
    ordered = most_urgent_first(stock, ready)
    return Choice() if ordered is None else Choice(up_to(ordered, stock.num_samples))


@SAMPLERS.register("in_order")
class InOrder(Sampler):
    """Waits for a slow piece."""

    def choose(self, stock: Stock) -> Choice:
        """The lowest numbers, once all of them are there."""
        taken = up_to(sorted(stock.ready, key=lambda one: one.number), stock.num_samples)
        waits = any(one.number < taken[-1].number for one in [*stock.coming, *stock.lost] if taken)
        return Choice() if waits else Choice(taken)


@SAMPLERS.register("random")
class RandomOrder(Sampler):
    """Drawn by the run's seed and the batch's number, without replacement."""

    def choose(self, stock: Stock) -> Choice:
        """Any that are ready, in time."""
        order = np.random.default_rng(list(stock.seed)).permutation(len(stock.ready))
        return _in_time(stock, [stock.ready[place] for place in order])


@SAMPLERS.register("ready_first")
class ReadyFirst(Sampler):
    """Long responses come later than short ones: a batch's lengths are biased by its place."""

    def choose(self, stock: Stock) -> Choice:
        """The first to come, in time."""
        return _in_time(stock, stock.ready)


@SAMPLERS.register("version_window")
class VersionWindow(Sampler):
    """A bound that discards, inside the bound that paces (`detached.max_staleness`)."""

    def choose(self, stock: Stock) -> Choice:
        """The first to come within the window, the oldest versions first."""
        window = stock.max_staleness if stock.window is None else stock.window
        inside = sorted(stock.ready, key=lambda one: one.version)
        dropped = [one for one in inside if one.version < stock.version - window]
        taken = up_to(inside[len(dropped) :], stock.num_samples)
        return Choice(taken, [(one, f"older than {window} versions") for one in dropped])
