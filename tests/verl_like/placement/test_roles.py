"""Role names, aliases, and the mapping from roles to pools."""

from __future__ import annotations

import pytest

from verl_like.errors import PlacementError
from verl_like.placement.pools import Role, expand_roles, roles_by_pool


def test_an_alias_expands_to_several_roles() -> None:
    assert expand_roles({Role.ActorRolloutRef: "p"}) == {"actor": "p", "rollout": "p", "ref": "p"}


@pytest.mark.parametrize(
    ("mapping", "expanded"),
    [
        ({"actor_rollout": "p", "rollout": "q"}, {"actor": "p", "rollout": "q"}),
        ({"rollout": "q", "actor_rollout": "p"}, {"rollout": "q", "actor": "p"}),
        (
            {"ref": "r", "actor_rollout_ref": "p", "actor_rollout": "q"},
            {"ref": "r", "actor": "q", "rollout": "q"},
        ),
    ],
)
def test_the_narrower_of_two_names_of_a_role_counts(
    mapping: dict[str, str], expanded: dict[str, str]
) -> None:
    assert expand_roles(mapping) == expanded


def test_roles_of_a_pool_have_the_order_of_the_mapping() -> None:
    mapping = {"critic": "p", "actor_rollout": "p", "my_own_role": "q"}
    assert roles_by_pool(["q", "p"], mapping) == {
        "q": ["my_own_role"],
        "p": ["critic", "actor", "rollout"],
    }


def test_a_pool_without_a_role_is_rejected() -> None:
    with pytest.raises(PlacementError, match="pool 'spare' has no role"):
        roles_by_pool(["main", "spare"], {"critic": "main"})
    with pytest.raises(PlacementError, match=r"'critic_pol' has no role\. Did you mean 'critic_po"):
        roles_by_pool(["critic_pool", "critic_pol"], {"critic": "critic_pool"})
