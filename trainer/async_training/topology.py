"""Routes: which trainer ranks get a generator's samples, and which rank sends it weights.

    topology = Topology.of(*counts("2m1t"))
    print(topology.describe())

The configuration determines the routes before any process starts. Generator 0 is the role
`rollout`, generator 1 is `rollout_1`, and so on, each on its own pool. The trainers are the ranks
of one pool.
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
"""In place of a trainer rank: the samples may go to any rank."""
Other = TypeVar("Other")
Route = tuple[int, int]
"""(sender, receiver): (generator, trainer rank) for samples, (trainer rank, generator) for weights.
"""
CRITIC_COPY = "critic_copy"
"""Role of a copy of the critic with which a generator computes the values of its samples."""
TRAINER_POOL = "trainer_pool"
"""The pool whose ranks are the trainers."""


def role_on(role: str, generator: int) -> str:
    """Return the name of a role at this generator: `ref`, `ref_1`, ..."""
    return f"{role}_{generator}" if generator else role


def generator_role(generator: int) -> str:
    """Return the name of a generator's rollout role."""
    return role_on("rollout", generator)


def generator_pool(generator: int) -> str:
    """Return the name of a generator's pool."""
    return f"generator_{generator}_pool"


def counts(preset: str) -> tuple[int, int]:
    """Return the numbers of generators and trainers in a name such as `2m1t`."""
    match = re.fullmatch(r"([1-9]\d*)m([1-9]\d*)t", preset)
    if match is None:
        raise ConfigError(
            f"{preset!r} is not a topology. Write <generators>m<trainers>t, such as 2m1t for 2 "
            "generators and 1 trainer; both numbers are 1 or more."
        )
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Topology:
    """Generators, trainer ranks, and the routes between them."""

    generators: int
    trainers: int
    experience: tuple[Route, ...]
    weights: tuple[Route, ...]

    @classmethod
    def of(
        cls,
        generators: int,
        trainers: int,
        sample_routes: Iterable[Sequence[int]] | None = None,
        weight_routes: Iterable[Sequence[int]] | None = None,
    ) -> Topology:
        """Return the topology with these routes or the default routes, and check it.

        Default sample routes: if there are more generators than trainers, every generator sends to
        one trainer; otherwise, every trainer gets samples from one generator. Default weight
        routes: every generator gets weights from one trainer; some trainers may send none.
        """
        for noun, number in (("generators", generators), ("trainers", trainers)):
            if type(number) is not int or number < 1:
                raise ConfigError(
                    f"async_training.{noun}={number}: use a whole number of 1 or more."
                )
        if sample_routes is None:
            num = max(generators, trainers)
            sample_routes = [(i % generators, i % trainers) for i in range(num)]
        if weight_routes is None:
            weight_routes = [(generator % trainers, generator) for generator in range(generators)]
        of_generators, of_trainers = ("generator", generators), ("trainer", trainers)
        experience = _pairs("sample_routes", sample_routes, of_generators, of_trainers)
        weights = _pairs("weight_routes", weight_routes, of_trainers, of_generators)
        topology = cls(generators, trainers, experience, weights)
        topology._check_reached()
        return topology

    @cached_property
    def trainers_of(self) -> dict[int, list[int]]:
        """Map each generator to the trainer ranks that get its samples."""
        return by_first(self.experience)

    @cached_property
    def generators_of(self) -> dict[int, list[int]]:
        """Map each trainer rank to the generators whose samples it gets."""
        return by_first((trainer, generator) for generator, trainer in self.experience)

    @property
    def routed_ranks(self) -> list[int]:
        """Return the trainer ranks that have their own generators, or `[ANY_RANK]`.

        `ANY_RANK` means that every generator's samples may go to every rank.
        """
        if len(self.experience) == self.generators * self.trainers:
            return [ANY_RANK]
        return list(range(self.trainers))

    def generators_for(self, rank: int) -> list[int]:
        """Return the generators that generate for one of `routed_ranks`."""
        return list(range(self.generators)) if rank == ANY_RANK else self.generators_of[rank]

    @property
    def imbalance(self) -> str:
        """Describe ranks that have more generators than others; "" if there are none."""
        part = [1 / len(self.trainers_of[generator]) for generator in range(self.generators)]
        ranks = self.routed_ranks
        shares = {r: sum(part[generator] for generator in self.generators_for(r)) for r in ranks}
        most, least = max(shares, key=lambda r: shares[r]), min(shares, key=lambda r: shares[r])
        if shares[most] == shares[least]:
            return ""
        return (
            f"trainer {least} has {shares[least]:.3g} of the generators for its part of a batch, "
            f"trainer {most} has {shares[most]:.3g}, so every batch waits for trainer {least}. "
            "Give all ranks the same number of generators, or let each generator send to all "
            "ranks (async_training.sample_routes)"
        )

    def chunk_size(self, batch: int) -> int:
        """Return the largest number of prompts per chunk with which no generator stays idle.

        It divides the batch of a rank, or is 1 if there are more generators than prompts.
        """
        ranks = self.routed_ranks
        part = batch // len(ranks)
        generators = max(len(self.generators_for(rank)) for rank in ranks)
        return next(n for n in range(max(part // generators, 1), 0, -1) if part % n == 0)

    def weight_sender(self, generator: int) -> int:
        """Return the trainer rank that sends this generator its weights."""
        return next(trainer for trainer, receiver in self.weights if receiver == generator)

    def weight_receivers(self, trainer: int) -> list[int]:
        """Return the generators that this trainer rank sends weights to."""
        return [generator for sender, generator in self.weights if sender == trainer]

    def roles(self) -> dict[str, str]:
        """Return the pool of every generator's role."""
        return {
            generator_role(generator): generator_pool(generator)
            for generator in range(self.generators)
        }

    def describe(self) -> str:
        """Return the table of routes."""
        rows = [("sender", "role or rank", "pool", "samples to", "weights to")]
        for generator, (role, pool) in enumerate(self.roles().items()):
            to = _named("trainer", self.trainers_of[generator])
            rows.append((f"generator {generator}", role, pool, to, "-"))
        for trainer in range(self.trainers):
            to = _named("generator", self.weight_receivers(trainer))
            rows.append((f"trainer {trainer}", f"rank {trainer}", TRAINER_POOL, "-", to))
        return "\n".join(draw_table(rows))

    def _check_reached(self) -> None:
        """Check that each generator has receivers and one sender, and each trainer gets samples."""
        senders_of = by_first((generator, str(trainer)) for trainer, generator in self.weights)
        for generator in range(self.generators):
            if generator not in self.trainers_of:
                raise ConfigError(
                    f"async_training.sample_routes: generator {generator} sends its samples to no "
                    f"trainer. Add [{generator},{generator % self.trainers}]."
                )
            senders = senders_of.get(generator, [])
            if len(senders) != 1:
                raise ConfigError(
                    f"async_training.weight_routes: generator {generator} gets weights from "
                    f"{'trainers ' + ', '.join(senders) if senders else 'no trainer'}. All "
                    "trainers have the same weights: set exactly one route, such as "
                    f"[{generator % self.trainers},{generator}]."
                )
        for trainer in range(self.trainers):
            if trainer not in self.generators_of:
                raise ConfigError(
                    f"async_training.sample_routes: trainer {trainer} gets no samples, and "
                    "the other trainers would wait for it. Add "
                    f"[{trainer % self.generators},{trainer}]."
                )


def by_first(pairs: Iterable[tuple[int, Other]]) -> dict[int, list[Other]]:
    """Group pairs: map each first member to its second members, in order."""
    seconds: dict[int, list[Other]] = defaultdict(list)
    for first, second in pairs:
        seconds[first].append(second)
    return dict(seconds)


def _pairs(
    name: str, routes: Iterable[Sequence[int]], sender: tuple[str, int], receiver: tuple[str, int]
) -> tuple[Route, ...]:
    """Return the sorted routes of a setting; `sender` and `receiver` are (name, number)."""
    pairs: list[Route] = []
    key = f"async_training.{name}"
    for edge in routes:
        ends = list(edge) if isinstance(edge, Iterable) and not isinstance(edge, str) else [edge]
        if len(ends) != 2 or any(type(end) is not int for end in ends):
            raise ConfigError(
                f"{key}: {edge} is not a route. Use two numbers, [{sender[0]},{receiver[0]}]."
            )
        for end, (noun, number) in zip(ends, (sender, receiver), strict=True):
            if not 0 <= end < number:
                raise ConfigError(
                    f"{key}: [{ends[0]},{ends[1]}] names {noun} {end}, which does not exist: "
                    f"{noun}s are numbered from 0, and async_training.{noun}s={number}."
                )
        pairs.append((ends[0], ends[1]))

    for (first, second), number in Counter(pairs).items():
        if number > 1:
            raise ConfigError(f"{key}: [{first},{second}] is listed {number} times. Keep one.")
    return tuple(sorted(pairs))


def _named(noun: str, numbers: Sequence[int]) -> str:
    """Return words such as `trainer 0, 2`, or a dash if there are no numbers."""
    return f"{noun} {', '.join(map(str, numbers))}" if numbers else "-"
