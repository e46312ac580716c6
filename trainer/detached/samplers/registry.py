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

from trainer.detached.experience import Experience
from trainer.detached.pieces import Piece
from verl_like.errors import ConfigError
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
    seed: Sequence[int]
    """Of this batch's own randomness: the run's seed and the number of the batch."""
    window: int | None = None
    """`detached.window`, where it is set."""

    def last_call(self, made_by: int | None) -> bool:
        """Whether samples of that version would be too old after the next weights."""
        return made_by is not None and self.version - made_by >= self.max_staleness


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


def _check(sampler: Any, subject: str) -> None:
    """Refuse what is no class of samplers, or cannot be made without arguments."""
    if not (isinstance(sampler, type) and issubclass(sampler, Sampler)):
        raise ConfigError(
            f"{subject} is no class of samplers: make it a subclass of "
            "trainer.detached.samplers.registry.Sampler."
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
    """`ready` with those at the head that would be too old later; None: one is still coming."""
    if any(stock.last_call(version) for _, version in stock.coming):
        return None
    urgent = [one for one in ready if stock.last_call(one.version)]
    return [*urgent, *(one for one in ready if one not in urgent)]
