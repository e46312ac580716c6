"""Who sends what to whom: makers give experience to trainer ranks, which give weights to makers.

    topology = Topology.of(*counts("2m1t"))
    print(topology.describe())

It follows from the configuration, before anything is started. Maker 0 is the role `rollout`, maker
1 `rollout_1`, and so on, each on a pool of its own; the trainers are the ranks of one pool.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from verl_like.errors import ConfigError
from verl_like.terminal import draw_table

ANY_RANK = -1
"""In the place of a trainer rank: samples may go to whichever."""
Other = TypeVar("Other")
Edge = tuple[int, int]
"""(sender, receiver): (maker, trainer rank) of experience, (trainer rank, maker) of weights."""
TRAINER_POOL = "trainer_pool"
"""The pool whose ranks are the trainers."""
PRESETS = ("1m1t", "2m1t", "1m2t", "2m2t")
"""Names that messages show as examples; there is `<N>m<M>t` for any two numbers."""


def role_on(role: str, maker: int) -> str:
    """What a role of makers is called at this one: `ref`, `ref_1`, ..."""
    return f"{role}_{maker}" if maker else role


def maker_role(maker: int) -> str:
    """The role of a maker that generates."""
    return role_on("rollout", maker)


def maker_pool(maker: int) -> str:
    """The pool of a maker."""
    return f"maker_{maker}_pool"


def counts(preset: str) -> tuple[int, int]:
    """Makers and trainers of a name such as `2m1t`."""
    found = re.fullmatch(r"([1-9]\d*)m([1-9]\d*)t", preset)
    if found is None:
        raise ConfigError(
            f"the topology {preset!r} is none: give makers and trainers as in "
            f"{', '.join(PRESETS)}, each number 1 or more."
        )
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class Topology:
    """Makers, trainer ranks, and the edges between them."""

    makers: int
    trainers: int
    experience: tuple[Edge, ...]
    weights: tuple[Edge, ...]

    @classmethod
    def of(
        cls,
        makers: int,
        trainers: int,
        edges: Iterable[Sequence[int]] | None = None,
        weight_edges: Iterable[Sequence[int]] | None = None,
    ) -> Topology:
        """The edges given, or those of the default rule; checked.

        Experience: with at least as many trainers as makers every trainer has one maker, with more
        makers every maker has one trainer. Weights: every maker has one trainer, and trainers may
        send nothing.
        """
        for what, number in (("makers", makers), ("trainers", trainers)):
            if type(number) is not int or number < 1:
                raise ConfigError(f"detached.{what}={number}: a number of 1 or more.")
        if edges is None:
            num = max(makers, trainers)
            experience = tuple((i % makers, i % trainers) for i in range(num))
        else:
            experience = _pairs("detached.edges", edges, ("maker", makers), ("trainer", trainers))
        if weight_edges is None:
            weights = tuple((maker % trainers, maker) for maker in range(makers))
        else:
            ends = ("trainer", trainers), ("maker", makers)
            weights = _pairs("detached.weight_edges", weight_edges, *ends)

        made = cls(makers, trainers, tuple(sorted(experience)), tuple(sorted(weights)))
        made._check_reached()
        return made

    @cached_property
    def _receivers(self) -> dict[int, list[int]]:
        return by_first(self.experience)

    @cached_property
    def _senders(self) -> dict[int, list[int]]:
        return by_first((trainer, maker) for maker, trainer in self.experience)

    def trainers_of(self, maker: int) -> list[int]:
        """The trainer ranks that get this maker's experience."""
        return self._receivers.get(maker, [])

    def makers_of(self, trainer: int) -> list[int]:
        """The makers whose experience this trainer rank gets."""
        return self._senders.get(trainer, [])

    @property
    def routed_ranks(self) -> list[int]:
        """The trainer ranks whose samples come from makers of their own.

        Where every maker serves every rank, rows may go to any: one answer, `ANY_RANK`.
        """
        if len(self.experience) == self.makers * self.trainers:
            return [ANY_RANK]
        return list(range(self.trainers))

    def makers_for(self, rank: int) -> list[int]:
        """The makers that make samples for one of `routed_ranks`."""
        return list(range(self.makers)) if rank == ANY_RANK else self.makers_of(rank)

    @property
    def lopsided(self) -> str:
        """Which rank has more of the makers than another, in words; nothing is an empty text."""
        shares = {
            rank: sum(1 / len(self.trainers_of(maker)) for maker in self.makers_for(rank))
            for rank in self.routed_ranks
        }
        most, least = max(shares, key=lambda r: shares[r]), min(shares, key=lambda r: shares[r])
        if shares[most] == shares[least]:
            return ""
        return (
            f"trainer {least} has {shares[least]:.3g} of the makers for its part of a batch, "
            f"trainer {most} has {shares[most]:.3g}, so every batch waits for the first: give all "
            "ranks as many makers, or let each maker send to all (detached.edges)"
        )

    def piece_size(self, batch: int) -> int:
        """Prompts of a piece, so that all makers have one of a batch of so many prompts."""
        ranks = self.routed_ranks
        part, makers = batch // len(ranks), max(len(self.makers_for(rank)) for rank in ranks)
        return next(n for n in range(max(part // makers, 1), 0, -1) if part % n == 0)

    def weight_sender(self, maker: int) -> int:
        """The trainer rank that sends this maker its weights."""
        return next(trainer for trainer, receiver in self.weights if receiver == maker)

    def weight_receivers(self, trainer: int) -> list[int]:
        """The makers that this trainer rank sends weights to; none for a rank that only learns."""
        return [maker for sender, maker in self.weights if sender == trainer]

    def roles(self) -> dict[str, str]:
        """Role of every maker -> its pool."""
        return {maker_role(maker): maker_pool(maker) for maker in range(self.makers)}

    def describe(self, width: int | None = None) -> str:
        """The table of edges, no wider than `width` columns."""
        rows = [("sender", "role or rank", "pool", "experience to", "weights to")]
        for maker in range(self.makers):
            to = _named("trainer", self.trainers_of(maker))
            rows.append((f"maker {maker}", maker_role(maker), maker_pool(maker), to, "-"))
        for trainer in range(self.trainers):
            to = _named("maker", self.weight_receivers(trainer))
            rows.append((f"trainer {trainer}", f"rank {trainer}", TRAINER_POOL, "-", to))
        return "\n".join(draw_table(rows, width))

    def _check_reached(self) -> None:
        """Refuse a maker that sends to nobody or has not one sender, a trainer without samples."""
        senders_of = by_first((maker, str(trainer)) for trainer, maker in self.weights)
        for maker in range(self.makers):
            if not self.trainers_of(maker):
                raise ConfigError(
                    f"detached.edges: maker {maker} sends its samples to nobody. Add "
                    f"[{maker},{maker % self.trainers}]."
                )
            senders = senders_of.get(maker, [])
            if len(senders) != 1:
                raise ConfigError(
                    f"detached.weight_edges: maker {maker} gets weights from "
                    f"{'trainers ' + ', '.join(senders) if senders else 'nobody'}. Give it one "
                    f"edge, such as [{maker % self.trainers},{maker}]: trainers hold the same ones."
                )
        for trainer in range(self.trainers):
            if not self.makers_of(trainer):
                raise ConfigError(
                    f"detached.edges: trainer {trainer} gets samples from nobody, and the other "
                    f"trainers would wait for it. Add [{trainer % self.makers},{trainer}]."
                )


def by_first(pairs: Iterable[tuple[int, Other]]) -> dict[int, list[Other]]:
    """First of a pair -> the others of its pairs, in their order."""
    found: dict[int, list[Other]] = defaultdict(list)
    for first, other in pairs:
        found[first].append(other)
    return dict(found)


def _pairs(
    key: str, edges: Iterable[Sequence[int]], sender: tuple[str, int], receiver: tuple[str, int]
) -> tuple[Edge, ...]:
    """The edges of a setting; `sender` and `receiver` are what they are called and their number."""
    pairs: list[Edge] = []
    for edge in edges:
        ends = list(edge) if isinstance(edge, Iterable) and not isinstance(edge, str) else [edge]
        if len(ends) != 2 or any(type(end) is not int for end in ends):
            raise ConfigError(
                f"{key}: {edge} is no edge. An edge is [{sender[0]},{receiver[0]}], two numbers."
            )
        for end, (what, number) in zip(ends, (sender, receiver), strict=True):
            if not 0 <= end < number:
                raise ConfigError(
                    f"{key}: [{ends[0]},{ends[1]}] names {what} {end}, and there is none: this "
                    f"run has {what}s 0 to {number - 1} (detached.{what}s={number})."
                )
        pairs.append((ends[0], ends[1]))

    for (first, second), number in Counter(pairs).items():
        if number > 1:
            raise ConfigError(f"{key}: [{first},{second}] is there {number} times. Keep one.")
    return tuple(pairs)


def _named(what: str, numbers: Sequence[int]) -> str:
    """`trainer 0, 2`; a dash for none."""
    return f"{what} {', '.join(map(str, numbers))}" if numbers else "-"
