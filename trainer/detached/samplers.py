"""What a sampler is asked and what it answers, and the names that `detached.sampler` may have.

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

from trainer.detached.pieces import Experience, Piece
from verl_like.errors import ConfigError, VerlLikeError
from verl_like.registry import Registry
from verl_like.signatures import Call, check_call, check_methods


@dataclass(frozen=True)
class Stock:
    """What a sampler may look at."""

    ready: Sequence[Experience]
    """In the order in which they came."""
    coming: Sequence[tuple[Piece, int | None]]
    """Pieces that are being made with that version, or (None) were lost and wait to be made."""
    num_samples: int
    """Of the batch."""
    version: int
    """Of the trainer's weights."""
    max_staleness: int
    samples_per_version: int
    """Trained on between two versions of the weights."""
    seed: Sequence[int]
    """Of this batch's own randomness: the run's seed and the number of the batch."""
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
    num_samples = sum(one.num_samples for one in choice.taken)
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
        if sum(one.num_samples for one in taken) + experience.num_samples <= num_samples:
            taken.append(experience)
    return taken if sum(one.num_samples for one in taken) == num_samples else []


def most_urgent_first(stock: Stock, ready: Sequence[Experience]) -> list[Experience] | None:
    """`ready` with those at the head that this batch must have, so that none grows too old.

    For every version, no more samples of it and of older ones may be left over than later batches
    take in time. None: one that this batch must have is still coming.
    """
    coming = [(piece, version) for piece, version in stock.coming if version is not None]
    head: dict[int, Experience] = {}
    for made_by in sorted({one.version for one in ready} | {version for _, version in coming}):
        due = [one for one in ready if one.version <= made_by and one.piece.number not in head]
        num_left = sum(one.num_samples for one in due)
        num_left += sum(piece.num_samples for piece, version in coming if version <= made_by)
        for one in due:
            if num_left <= stock.room_after(made_by):
                break
            head[one.piece.number] = one
            num_left -= one.num_samples
        if num_left > stock.room_after(made_by):
            return None
    return [*head.values(), *(one for one in ready if one.piece.number not in head)]


@SAMPLERS.register("in_order")
class InOrder(Sampler):
    """Waits for a slow piece."""

    def choose(self, stock: Stock) -> Choice:
        """The lowest piece numbers, once all of them are there."""
        ready = sorted(stock.ready, key=lambda one: one.piece.number)
        taken = up_to(ready, stock.num_samples)
        if not taken:
            return Choice()
        last = taken[-1].piece.number
        waits = any(piece.number < last for piece, _ in stock.coming)
        return Choice() if waits else Choice(taken)


@SAMPLERS.register("random")
class RandomOrder(Sampler):
    """Drawn by the run's seed and the batch's number, without replacement."""

    def choose(self, stock: Stock) -> Choice:
        """Any that are ready, after those that would be too old for the batch after this one."""
        order = np.random.default_rng(list(stock.seed)).permutation(len(stock.ready))
        shuffled = [stock.ready[place] for place in order]
        ordered = most_urgent_first(stock, shuffled)
        return Choice() if ordered is None else Choice(up_to(ordered, stock.num_samples))


@SAMPLERS.register("ready_first")
class ReadyFirst(Sampler):
    """Long responses come later than short ones: a batch's lengths are biased by its place."""

    def choose(self, stock: Stock) -> Choice:
        """The first to come, after those that would be too old for the batch after this one."""
        ordered = most_urgent_first(stock, stock.ready)
        return Choice() if ordered is None else Choice(up_to(ordered, stock.num_samples))


@SAMPLERS.register("version_window")
class VersionWindow(Sampler):
    """A bound that discards, inside the bound that paces (`detached.max_staleness`)."""

    def choose(self, stock: Stock) -> Choice:
        """The first to come within the window, the oldest versions first."""
        window = stock.max_staleness if stock.window is None else stock.window
        oldest = stock.version - window
        reason = f"older than {window} versions"
        dropped = [(one, reason) for one in stock.ready if one.version < oldest]
        inside = [one for one in stock.ready if one.version >= oldest]
        inside.sort(key=lambda one: one.version)
        return Choice(up_to(inside, stock.num_samples), dropped)
