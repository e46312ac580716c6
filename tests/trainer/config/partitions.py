"""All assignments of PPO's roles to pools."""

from __future__ import annotations

from collections.abc import Iterator

ROLES = ("actor", "rollout", "ref", "critic", "reward_model")


def partitions(roles: tuple[str, ...]) -> Iterator[list[list[str]]]:
    """Return every partition of the roles into pools."""
    if not roles:
        yield []
        return
    for rest in partitions(roles[1:]):
        yield [[roles[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [roles[0], *rest[place]], *rest[place + 1 :]]
