"""The best placements of roles on cards, over all ways to share them: exact, by bounds.

    found = best_placements(["actor", "critic"], [1, 2, 4, 8], 8, options, device_bytes)

`options(role, cards)` are the ways in which a role can be laid out on so many: seconds of every
stage, and bytes on each card. Roles of a pool take turns, pools run side by side: a stage takes as
long as its slowest pool, and a step the sum of its stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

Seconds = tuple[float, ...]
"""Of every stage."""


@dataclass(frozen=True)
class Option:
    """A role's layout on the cards of a pool."""

    role: str
    seconds: Seconds
    kept: float
    """Bytes on each card between calls."""
    call: float
    """Bytes that a call takes on top; of roles that share cards the largest counts."""
    keys: dict[str, str] = field(default_factory=dict, hash=False)
    """Overrides that set it."""
    beside: str = ""
    """A role on whose cards it saves seconds,"""
    saves: Seconds = ()
    """these of every stage."""


@dataclass(frozen=True)
class Pool:
    """Roles that share so many cards, each laid out in one way."""

    cards: int
    options: tuple[Option, ...]

    @property
    def roles(self) -> list[str]:
        """In order."""
        return [option.role for option in self.options]

    @cached_property
    def seconds(self) -> Seconds:
        """Of every stage: the roles take turns."""
        stages = zip(*(option.seconds for option in self.options), strict=True)
        total = tuple(float(sum(of_roles)) for of_roles in stages)
        for option in self.options:
            if option.beside in self.roles:
                total = tuple(a - b for a, b in zip(total, option.saves, strict=True))
        return total

    @cached_property
    def bytes(self) -> float:
        """On each card at most."""
        return sum(each.kept for each in self.options) + max(each.call for each in self.options)


@dataclass(frozen=True)
class Placement:
    """Pools that run side by side."""

    pools: tuple[Pool, ...]
    least: Seconds = ()
    """Of every stage, what the driver takes beside the pools."""

    @property
    def seconds(self) -> Seconds:
        """Of every stage."""
        beside = [self.least] if self.least else []
        pools = (pool.seconds for pool in self.pools)
        return tuple(map(max, zip(*pools, *beside, strict=True)))

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.seconds)

    @property
    def cards(self) -> int:
        """Of all pools."""
        return sum(pool.cards for pool in self.pools)


Options = Callable[[str, int], Sequence[Option]]


@dataclass
class Search:
    """Keeps what fits on a pool, by its roles and cards, over searches of several sizes."""

    roles: Sequence[str]
    options: Options
    device_bytes: float
    least: Seconds = ()
    """Of every stage, what the driver takes beside the pools."""
    _pools: dict[tuple[tuple[str, ...], int], list[Pool]] = field(default_factory=dict)
    _found: dict[tuple[tuple[str, ...], int], list[tuple[Option, ...]]] = field(
        default_factory=dict
    )

    def best(self, sizes: Sequence[int], num_cards: int, count: int = 5) -> list[Placement]:
        """Of every way to share the cards the `count` fastest sizes of pools; fastest first."""
        found: dict[tuple[tuple[tuple[str, ...], int], ...], Placement] = {}
        for parts in partitions(self.roles):
            self._fill(parts, sizes, num_cards, count, found)
        return sorted(found.values(), key=lambda placement: placement.step)

    def pools(self, roles: tuple[str, ...], cards: int) -> list[Pool]:
        """Ways to lay out these roles on one pool that fit and that no other beats everywhere."""
        key = roles, cards
        if key not in self._pools:
            pools = [Pool(cards, way) for way in self._ways(roles, cards)]
            if pools:
                best = _undominated(np.array([pool.seconds for pool in pools]))
                pools = [pools[number] for number in best]
            self._pools[key] = pools
        return self._pools[key]

    def _ways(self, roles: tuple[str, ...], cards: int) -> list[tuple[Option, ...]]:
        """Those that fit and may be best, also once more roles share the cards."""
        key = roles, cards
        if key not in self._found:
            *others, last = roles
            if others:
                first = _Ways(self._ways(tuple(others), cards))
                found = first.beside(_Ways(self._ways((last,), cards)))
            else:
                found = _Ways([(option,) for option in self.options(last, cards)])
            self._found[key] = found.best(self.device_bytes)
        return self._found[key]

    def _fill(
        self,
        parts: tuple[tuple[str, ...], ...],
        sizes: Sequence[int],
        num_cards: int,
        count: int,
        found: dict[tuple[tuple[tuple[str, ...], int], ...], Placement],
    ) -> None:
        """Add the fastest placements of roles shared in this way."""
        own: list[Placement] = []

        def limit() -> float:
            return own[count - 1].step if len(own) >= count else float("inf")

        def extend(taken: tuple[Pool, ...], left: int) -> None:
            if taken and Placement(taken, self.least).step >= limit():
                return
            if len(taken) == len(parts):
                own.append(Placement(taken, self.least))
                own.sort(key=lambda placement: placement.step)
                _keep_fastest(own, count)
                return
            waiting = len(parts) - len(taken) - 1
            for cards in reversed(sizes):
                if cards <= left - waiting * sizes[0]:
                    for pool in self.pools(parts[len(taken)], cards):
                        extend((*taken, pool), left - cards)

        extend((), num_cards)
        found |= {_shape(placement): placement for placement in own}


def _shape(placement: Placement) -> tuple[tuple[tuple[str, ...], int], ...]:
    return tuple((tuple(pool.roles), pool.cards) for pool in placement.pools)


def _keep_fastest(own: list[Placement], count: int) -> None:
    """Of a sorted list, the first of every shape, and `count` of them."""
    by_shape: dict[tuple[tuple[tuple[str, ...], int], ...], Placement] = {}
    for placement in own:
        by_shape.setdefault(_shape(placement), placement)
    own[:] = list(by_shape.values())[:count]


def partitions(roles: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All ways to put the roles into groups."""
    if not roles:
        yield ()
        return
    first, *others = roles
    for parts in partitions(others):
        yield ((first,), *parts)
        for number, part in enumerate(parts):
            yield (*parts[:number], (first, *part), *parts[number + 1 :])


class _Ways:
    """Ways to lay out some roles, and their measures as arrays."""

    def __init__(self, ways: list[tuple[Option, ...]]) -> None:
        self.ways = ways
        if ways:
            self.seconds = np.array([Pool(0, way).seconds for way in ways])
            self.kept = np.array([sum(option.kept for option in way) for way in ways])
            self.call = np.array([max(option.call for option in way) for way in ways])

    def beside(self, more: _Ways) -> _Ways:
        """Every way of these with every one of more roles."""
        found = _Ways([])
        found.ways = [first + second for first, second in product(self.ways, more.ways)]
        if found.ways:
            found.seconds = (self.seconds[:, None] + more.seconds).reshape(len(found.ways), -1)
            found.kept = np.add.outer(self.kept, more.kept).ravel()
            found.call = np.maximum.outer(self.call, more.call).ravel()
        return found

    def best(self, device_bytes: float) -> list[tuple[Option, ...]]:
        """Those that fit and that no other beats in every measure."""
        if not self.ways:
            return []
        fits = np.flatnonzero(self.kept + self.call <= device_bytes)
        measures = np.column_stack([self.seconds, self.kept, self.call])[fits]
        return [self.ways[fits[number]] for number in _undominated(measures)]


def _undominated(measures: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rows that no other is at least as good as in every column; of equals the first."""
    order = np.lexsort(measures.T[::-1])
    left, number = measures[order], 0
    while number < len(left):
        is_better = (left < left[number]).any(axis=1)
        is_better[number] = True
        left, order = left[is_better], order[is_better]
        number = int(is_better[: number + 1].sum())
    return order
