"""The search finds what trying everything finds."""

from __future__ import annotations

import random
from itertools import product

import pytest

from trainer.planner.search import Option, Placement, Pool, Search, partitions

DEVICE = 100.0
SIZES = [1, 2, 4]
STAGES = {"actor": (0.0, 3.0), "rollout": (1.0, 0.0)}
"""Seconds of two roles, neither of which waits beside the other."""


def random_options(seed: int, roles: list[str]) -> dict[tuple[str, int], list[Option]]:
    """A few layouts of every role on every size, drawn at random."""
    draw = random.Random(seed)
    found = {}
    for role, cards in product(roles, SIZES):
        options = []
        for _ in range(draw.randrange(1, 4)):
            seconds = tuple(draw.choice([0.0, draw.uniform(1, 10)]) / cards for _ in range(3))
            beside = draw.choice(["", roles[0]]) if role != roles[0] else ""
            saves = (0.0, 0.0, seconds[2] / 2) if beside else ()
            memory = draw.uniform(5, 60), draw.uniform(0, 40)
            options.append(Option(role, seconds, *memory, {}, beside, saves))
        found[role, cards] = options
    return found


def all_placements(
    options: dict[tuple[str, int], list[Option]], roles: list[str], num_cards: int
) -> list[Placement]:
    """Everything that fits."""
    found = []
    for parts in partitions(roles):
        for sizes in product(SIZES, repeat=len(parts)):
            if sum(sizes) > num_cards:
                continue
            of_parts = [
                [Pool(cards, ways) for ways in product(*(options[role, cards] for role in part))]
                for part, cards in zip(parts, sizes, strict=True)
            ]
            found += [
                Placement(pools)
                for pools in product(*of_parts)
                if all(pool.bytes <= DEVICE for pool in pools)
            ]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_fastest_placements_are_those_of_trying_everything(seed: int) -> None:
    roles = ["actor", "rollout", "ref", "critic"][: 2 + seed % 3]
    options = random_options(seed, roles)
    search = Search(roles, lambda role, cards: options[role, cards], DEVICE)
    for num_cards in (2, 4, 7):
        expected = all_placements(options, roles, num_cards)
        found = search.best(SIZES, num_cards, count=3)
        assert bool(found) == bool(expected)
        if found:
            assert found[0].step == pytest.approx(min(each.step for each in expected))
            assert found == sorted(found, key=lambda placement: placement.step)
            assert all(each.cards <= num_cards for each in found)


def test_every_way_to_share_cards_is_found_with_its_fastest_sizes() -> None:
    roles = ["actor", "rollout", "critic"]
    options = random_options(5, roles)
    search = Search(roles, lambda role, cards: options[role, cards], DEVICE)
    fastest: dict[frozenset[tuple[str, ...]], float] = {}
    for each in all_placements(options, roles, 6):
        shares = frozenset(tuple(pool.roles) for pool in each.pools)
        fastest[shares] = min(each.step, fastest.get(shares, each.step))
    found: dict[frozenset[tuple[str, ...]], float] = {}
    for each in search.best(SIZES, 6, count=2):
        shares = frozenset(tuple(pool.roles) for pool in each.pools)
        found.setdefault(shares, each.step)
    assert found == pytest.approx(fastest)


def test_four_roles_can_be_shared_out_in_fifteen_ways() -> None:
    found = {frozenset(map(frozenset, parts)) for parts in partitions("abcd")}
    assert len(found) == len(list(partitions("abcd"))) == 15


def test_roles_that_share_cards_take_turns_and_pools_run_side_by_side() -> None:
    first, second = Option("a", (1.0, 2.0), 10, 30), Option("b", (3.0, 0.5), 20, 40)
    together, apart = Placement((Pool(4, (first, second)),)), None
    apart = Placement((Pool(2, (first,)), Pool(2, (second,))))
    assert (together.seconds, together.pools[0].bytes) == ((4.0, 2.5), 70)
    assert (apart.seconds, apart.step, apart.cards) == ((3.0, 2.0), 5.0, 4)


def test_of_placements_that_take_as_long_the_one_on_fewer_cards_is_first() -> None:
    options = {role: Option(role, seconds, 10, 10) for role, seconds in STAGES.items()}
    found = Search(list(STAGES), lambda role, _: [options[role]], DEVICE).best([1], 2)
    assert [(each.step, each.cards) for each in found] == [(4.0, 1), (4.0, 2)]
