"""The best placements of roles on cards, over all ways to share them: exact, by bounds.

    search = Search(["actor", "critic"], options, device_bytes)
    found = search.best([1, 2, 4, 8], 8)

`options(role, cards)` are the ways in which a role can be laid out on so many: seconds of every
stage, and bytes on each card. Roles of a pool take turns, pools run side by side: a stage takes as
long as its slowest pool, and a step the sum of its stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import inf

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

    @property
    def in_words(self) -> str:
        """Roles and cards of every pool."""
        return " | ".join(f"{' + '.join(pool.roles)} on {pool.cards}" for pool in self.pools)

    @property
    def shares(self) -> Hashable:
        """Which roles share cards, whatever their number."""
        return frozenset(tuple(pool.roles) for pool in self.pools)

    def limit(self, stages: Sequence[str]) -> str:
        """The stage that takes longest, and the pool that it waits for."""
        number = max(range(len(stages)), key=self.seconds.__getitem__)
        pool = max(self.pools, key=lambda pool: pool.seconds[number])
        return f"{stages[number]} of {' + '.join(pool.roles)}"


Options = Callable[[str, int], Sequence[Option]]


@dataclass
class Search:
    """Keeps what fits on a pool, by its roles and cards, over searches of several sizes."""

    roles: Sequence[str]
    options: Options
    device_bytes: float
    least: Seconds = ()
    """Of every stage, what the driver takes beside the pools."""
    _least: dict[tuple[tuple[str, ...], int], Seconds | None] = field(default_factory=dict)
    _pools: dict[tuple[tuple[str, ...], int], list[Pool]] = field(default_factory=dict)
    _found: dict[tuple[tuple[str, ...], int], list[tuple[Option, ...]]] = field(
        default_factory=dict
    )

    def best(
        self, sizes: Sequence[int], num_cards: int, count: int = 5, of_each: bool = True
    ) -> list[Placement]:
        """The `count` fastest ways to share the cards, fastest first, of equals on fewer cards.

        `of_each` adds the fastest of every partition of the roles that is not among them.
        """
        fastest: list[Placement] = []
        of_parts: list[Placement] = []
        fewest: Fewest = {}
        for parts in partitions(self.roles):
            partition = _Partition(self, parts, sizes, fewest, fastest, count, of_each)
            partition.extend((), self.least, num_cards)
            if of_each and partition.best is not None:
                of_parts.append(partition.best)
        found = {_shape(placement): placement for placement in [*of_parts, *fastest]}
        return sorted(found.values(), key=lambda placement: (placement.step, placement.cards))

    def pools(self, roles: tuple[str, ...], cards: int) -> list[Pool]:
        """Ways to lay out these roles on one pool that fit and that no other beats everywhere."""
        key = roles, cards
        if key not in self._pools:
            quick = self._quick_ways(roles, cards)
            ways = self._ways(roles, cards) if quick is None else quick
            pools = [Pool(cards, way) for way in ways]
            if pools:
                best = _undominated(np.array([pool.seconds for pool in pools]))
                pools = [pools[number] for number in best]
            self._pools[key] = pools
        return self._pools[key]

    def least_seconds(self, roles: tuple[str, ...], cards: int) -> Seconds | None:
        """Of each stage, if every role had the fastest layout for it, whether they fit together or
        not; None where one of them fits nowhere."""
        key = roles, cards
        if key not in self._least:
            of_roles = [self._alone(role, cards) for role in roles]
            at_least = [np.min(seconds, axis=0) for seconds in of_roles if len(seconds)]
            has_all = len(at_least) == len(roles)
            self._least[key] = tuple(map(float, sum(at_least))) if has_all else None
        return self._least[key]

    def _alone(self, role: str, cards: int) -> NDArray[np.float64]:
        """Seconds of every stage of its layouts, less what they may save beside others."""
        options = [way[0] for way in self._ways((role,), cards)]
        return np.array(
            [
                np.subtract(each.seconds, each.saves or (0.0,) * len(each.seconds))
                for each in options
            ]
        )

    def _quick_ways(self, roles: tuple[str, ...], cards: int) -> list[tuple[Option, ...]] | None:
        """Those of each role's fastest options, where even the largest of them fit together; else
        None: slower options that take less memory count, too."""
        fastest = []
        for role in roles:
            options = [way[0] for way in self._ways((role,), cards)]
            if not options:
                return []
            nothing = (0.0,) * len(options[0].seconds)
            measures = [
                (*option.seconds, *(-saved for saved in option.saves or nothing))
                for option in options
            ]
            best = _undominated(np.array(measures))
            fastest.append([options[number] for number in best])
        kept = sum(max(option.kept for option in options) for options in fastest)
        call = max(option.call for options in fastest for option in options)
        return list(product(*fastest)) if kept + call <= self.device_bytes else None

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


Fewest = dict[tuple[tuple[str, ...], int], Seconds | None]
"""Roles of a pool and how many of the sizes it may have -> seconds of each stage at least; None
where they have no room."""


@dataclass
class _Partition:
    """The search over sizes of the pools of one partition of the roles: branch and bound."""

    search: Search
    parts: tuple[tuple[str, ...], ...]
    sizes: Sequence[int]
    fewest: Fewest
    overall: list[Placement]
    """The fastest of all partitions so far, of which `count` are wanted."""
    count: int
    is_wanted: bool
    """Whether the fastest of this partition is, however slow."""
    best: Placement | None = None
    """Of this partition."""

    def extend(self, taken: tuple[Pool, ...], seconds: Seconds, left: int) -> None:
        """Try all pools for the parts behind those taken, which take these seconds together."""
        if len(taken) == len(self.parts):
            self._add(Placement(taken, self.search.least))
            return
        roles, first = self.parts[len(taken)], len(taken) + 1
        most = left - (len(self.parts) - first) * self.sizes[0]
        bounds = []
        for cards in self.sizes[: bisect_right(self.sizes, most)]:
            num_sizes = bisect_right(self.sizes, left - cards)
            least = self.search.least_seconds(roles, cards)
            if least is not None:
                now = tuple(map(max, seconds, least)) if seconds else least
                bounds.append((self._at_least(now, first, num_sizes), cards, num_sizes))
        for bound, cards, num_sizes in sorted(bounds):
            if bound >= self._limit():
                return
            for pool in self.search.pools(roles, cards):
                now = tuple(map(max, seconds, pool.seconds)) if seconds else pool.seconds
                if self._at_least(now, first, num_sizes) < self._limit():
                    self.extend((*taken, pool), now, left - cards)

    def _at_least(self, now: Seconds, first: int, num_sizes: int) -> float:
        """Seconds of a step with the parts from `first` on, each on the best of the first so many
        sizes."""
        for roles in self.parts[first:]:
            fewest = self._fewest_seconds(roles, num_sizes)
            if fewest is None:
                return inf
            now = tuple(map(max, now, fewest))
        return sum(now)

    def _fewest_seconds(self, roles: tuple[str, ...], num_sizes: int) -> Seconds | None:
        key = roles, num_sizes
        if key not in self.fewest:
            of_sizes = (self.search.least_seconds(roles, size) for size in self.sizes[:num_sizes])
            found = [least for least in of_sizes if least is not None]
            self.fewest[key] = tuple(map(min, zip(*found, strict=True))) if found else None
        return self.fewest[key]

    def _limit(self) -> float:
        """Seconds of a step from which on a placement is of no use."""
        overall = self.overall[-1].step if len(self.overall) == self.count else inf
        if not self.is_wanted:
            return overall
        return max(self.best.step if self.best else inf, overall)

    def _add(self, placement: Placement) -> None:
        if self.best is None or placement.step < self.best.step:
            self.best = placement
        self.overall.append(placement)
        _keep_fastest(self.overall, self.count)


def _shape(placement: Placement) -> tuple[tuple[tuple[str, ...], int], ...]:
    return tuple((tuple(pool.roles), pool.cards) for pool in placement.pools)


def _keep_fastest(own: list[Placement], count: int) -> None:
    """The fastest of every shape, and `count` of them, in order."""
    by_shape: dict[tuple[tuple[tuple[str, ...], int], ...], Placement] = {}
    for placement in sorted(own, key=lambda placement: placement.step):
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
