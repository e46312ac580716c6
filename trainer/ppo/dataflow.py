"""The dataflow of a configuration as a graph: which call reads what another wrote, and which may
run at the same time.

Nothing here runs a step: `describe(config)` prints what `PPOTrainer.step` will do with that
configuration. The edges are not written down anywhere; they follow from the columns that calls read
and write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer.groups.worker_groups import worker_class
from trainer.ppo.compute_advantage import columns_read
from trainer.ppo.config import PPOConfig
from verl_like.placement.roles import expand_roles
from verl_like.terminal import draw_table
from workers.columns import reads_of

REUSE_NOTICE = (
    "notice: old log-probs are not computed in a pass of their own: an update is one optimizer "
    "step on samples of the current policy, so its own forward pass gives them"
)


def old_log_probs_are_the_updates_own(config: PPOConfig) -> bool:
    """Whether samples of the current policy need no old log-probs before the update.

    True if the first forward pass of the update sees every row under the weights that made it, and
    nothing reads the old log-probs earlier: one mini-batch, one epoch, no KL in the reward, no
    importance correction. (Models train without dropout.)
    """
    actor = config.actor_rollout_ref.actor
    if config.algorithm.rollout_correction.rollout_is is not None:
        return False
    if actor.ppo_epochs > 1 or actor.ppo_mini_batch_size != config.data.train_batch_size:
        return False
    return not config.algorithm.use_kl_in_reward and "old_log_probs" not in columns_read(
        config.algorithm.adv_estimator
    )


@dataclass(frozen=True)
class Node:
    """One call of a step: where it runs, what it reads and writes."""

    stage: str
    name: str
    pool: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def step_nodes(config: PPOConfig) -> list[Node]:
    """The calls of a step in the order in which the driver launches them."""
    algorithm, pools = config.algorithm, expand_roles(config.role_mapping)
    own_old = old_log_probs_are_the_updates_own(config)
    found: list[Node] = []

    def on_role(stage: str, role: str, method: str, *writes: str) -> None:
        if role in pools:
            reads = reads_of(worker_class(config, role), method) or ("responses",)
            found.append(Node(stage, f"{role}.{method}", pools[role], reads, writes))

    def on_driver(stage: str, name: str, reads: Iterable[str], *writes: str) -> None:
        found.append(Node(stage, name, "driver", tuple(reads), writes))

    on_driver("gen", "prompts", (), "input_ids", "uid")
    on_role(
        "gen",
        "rollout",
        "generate_sequences",
        "input_ids",
        "responses",
        "response_mask",
        "rollout_log_probs",
    )
    if algorithm.adv_estimator == "remax":
        on_driver("gen", "greedy_scores", ("responses",), "reward_baselines")
    on_role("score", "reward_model", "compute_rm_score", "rm_scores")
    rm_scores = ("rm_scores",) if "reward_model" in pools else ()
    on_driver("score", "rewards", ("responses", *rm_scores), "token_level_scores")
    if not own_old:
        on_role("score", "actor", "compute_log_prob", "old_log_probs")
    on_role("score", "ref", "compute_ref_log_prob", "ref_log_prob")
    on_role("score", "critic", "compute_values", "values")
    kl_reads = ("old_log_probs", "ref_log_prob") if algorithm.use_kl_in_reward else ()
    on_driver("adv", "token rewards", ("token_level_scores", *kl_reads), "token_level_rewards")
    on_driver(
        "adv",
        algorithm.adv_estimator,
        columns_read(algorithm.adv_estimator),
        "advantages",
        "returns",
    )
    on_role("update", "critic", "update_critic", "critic weights")
    on_role("update", "actor", "update_actor", "actor weights")
    on_driver("update_weights", "sync_weights", ("actor weights",), "rollout weights")
    return found


def edges(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Name of each node -> names of those whose columns it reads, the
    latest writer of each column.
    """
    writer: dict[str, str] = {}
    after: dict[str, list[str]] = {}
    for node in nodes:
        after[node.name] = list(
            dict.fromkeys(writer[column] for column in node.reads if column in writer)
        )
        writer |= dict.fromkeys(node.writes, node.name)
    return after


def side_by_side(nodes: Sequence[Node], after: dict[str, list[str]]) -> list[tuple[Node, Node]]:
    """Pairs of one stage of which neither waits for the other: they overlap where their pools
    differ.
    """
    waits: dict[str, set[str]] = {}
    for node in nodes:
        waits[node.name] = {far for near in after[node.name] for far in (near, *waits[near])}
    return [
        (first, second)
        for place, first in enumerate(nodes)
        for second in nodes[place + 1 :]
        if first.stage == second.stage and first.name not in waits[second.name]
    ]


def describe(config: PPOConfig, max_columns: int | None = None) -> str:
    """The graph in words: a line for every call with what it waits for, then which pairs overlap
    and which take turns.

    The table is no wider than `max_columns`. Bookkeeping columns such as the attention mask come
    with the tokens and are not drawn.
    """
    nodes = step_nodes(config)
    after = edges(nodes)
    rows = [("stage", "call", "pool", "after")]
    rows += [
        (node.stage, node.name, node.pool, ", ".join(after[node.name]) or "-") for node in nodes
    ]
    lines = draw_table(rows, max_columns, num_titles=2)
    pairs = side_by_side(nodes, after)
    for title, differ in (("at the same time", True), ("in turns, on one pool", False)):
        chosen = [f"{a.name} ‖ {b.name}" for a, b in pairs if (a.pool != b.pool) is differ]
        lines.append(f"{title}: {', '.join(chosen) or 'nothing'}")
    if old_log_probs_are_the_updates_own(config):
        lines.append(REUSE_NOTICE)
    return "\n".join(lines)
