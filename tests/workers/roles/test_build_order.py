"""Roles of one process may be built in any order: none changes another's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers.samples import learned, make_batch, started, tiny_config
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.reference import ReferenceWorker

ROLES: dict[str, tuple[type, tuple[int, ...]]] = {
    "actor": (ActorWorker, (10,)),
    "critic": (CriticWorker, (10,)),
    "ref": (ReferenceWorker, ()),
}


def numbers(tiny_dir: Path, order: tuple[str, ...]) -> dict[str, Any]:
    """Return each role's results, after all are built in this order; the updates come first."""
    config = tiny_config(tiny_dir, ppo_mini_batch_size=4)
    built = {role: started(ROLES[role][0], config, *ROLES[role][1]) for role in order}
    batch = make_batch(4)
    return {
        "actor": learned(built["actor"].update_actor(batch)),
        "critic": learned(built["critic"].update_critic(batch)),
        "ref": built["ref"].compute_ref_log_prob(batch).batch["ref_log_prob"].tolist(),
        "weights": [built[role].weights_checksum() for role in sorted(built)],
    }


OTHERS = [("ref", "critic", "actor"), ("critic", "actor", "ref")]


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> dict[str, Any]:
    return numbers(tiny_dir, tuple(ROLES))


@pytest.mark.parametrize("order", OTHERS, ids="-".join)
def test_the_order_in_which_roles_are_built_changes_nothing(
    order: tuple[str, ...], tiny_dir: Path, expected: dict[str, Any]
) -> None:
    assert numbers(tiny_dir, order) == expected
