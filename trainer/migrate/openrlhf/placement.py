"""Cards of each role -> pools."""

from __future__ import annotations

from trainer.migrate.openrlhf.given import GivenFlags
from trainer.migrate.translation import Translation

CARDS_OF_A_NODE = 8


def placement(flags: GivenFlags, done: Translation) -> None:
    """Roles that are colocated share the first one's pool; the others have pools of their own."""
    if flags.has("colocate_all_models"):
        _one_pool(flags, done)
        return
    shared = {}
    if flags.has("colocate_actor_ref"):
        shared["ref"] = "actor_pool"
    if flags.has("colocate_critic_reward") and flags.has_critic:
        shared["reward_model"] = "critic_pool"
    engines = flags.count("vllm_num_engines", 0) * flags.count("vllm_tensor_parallel_size", 1)
    if not engines:
        shared["rollout"] = "actor_pool"

    pools = {"actor_pool": _cards(flags, "actor")}
    if engines:
        pools["rollout_pool"] = _whole_nodes(engines)
    if _has_reference(flags) and "ref" not in shared:
        pools["ref_pool"] = _cards(flags, "ref")
    if flags.has_critic:
        pools["critic_pool"] = _cards(flags, "critic")
    if flags.has("reward_pretrain") and "reward_model" not in shared:
        pools["reward_pool"] = _cards(flags, "reward")
    _look_at_cards(flags)

    settings: dict[str, object] = {"placement": "standalone"}
    settings |= {f"role_mapping.{role}": pool for role, pool in shared.items()}
    settings |= {f"resource_pool_spec.{pool}": processes for pool, processes in pools.items()}
    total = sum(sum(processes) for processes in pools.values())
    settings["trainer.nnodes"] = max(-(-total // CARDS_OF_A_NODE), *map(len, pools.values()))
    settings["trainer.n_gpus_per_node"] = min(total, CARDS_OF_A_NODE)
    done.rename("--*_num_nodes, --*_num_gpus_per_node, --colocate_*", [], settings)
    done.absent.append(
        f"how many cards a node has: {CARDS_OF_A_NODE} are taken for it; set trainer.nnodes and "
        "trainer.n_gpus_per_node where yours have others"
    )


def _one_pool(flags: GivenFlags, done: Translation) -> None:
    """All models on the actor's cards."""
    processes = _cards(flags, "actor")
    _look_at_cards(flags)
    for name in ("colocate_actor_ref", "colocate_critic_reward"):
        flags.has(name)
    settings = {
        "placement": "colocate",
        "trainer.nnodes": len(processes),
        "trainer.n_gpus_per_node": processes[0],
    }
    done.rename(flags.spelled("colocate_all_models"), [], settings)


def _has_reference(flags: GivenFlags) -> bool:
    return not flags.has("init_kl_coef") or flags.number("init_kl_coef", 0.01) > 0


def _look_at_cards(flags: GivenFlags) -> None:
    """Roles that a run has not may have cards in its command, too."""
    for role in ("actor", "ref", "critic", "reward"):
        flags.values(f"{role}_num_nodes")
        flags.values(f"{role}_num_gpus_per_node")


def _cards(flags: GivenFlags, role: str) -> list[int]:
    """Cards of a role on each of its nodes."""
    per_node = flags.count(f"{role}_num_gpus_per_node", CARDS_OF_A_NODE)
    return [per_node] * flags.count(f"{role}_num_nodes", 1)


def _whole_nodes(cards: int) -> list[int]:
    """So many cards on as few nodes as possible."""
    full, rest = divmod(cards, CARDS_OF_A_NODE)
    return [CARDS_OF_A_NODE] * full + ([rest] if rest else [])
