"""The dataflow of a configuration as a graph: what waits for what, and what may overlap.

Nothing here runs a step: `describe(config)` prints what `PPOTrainer.step` will do with that
configuration. The edges are not written down anywhere; they follow from the columns that calls read
and write. `tests/trainer/ppo/test_dataflow_recorded.py` compares the nodes with the calls of real
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from trainer.ppo.compute_advantage import columns_read, compares_with_greedy
from trainer.ppo.config import PPOConfig
from trainer.ppo.correct_rollout import columns_of_correction
from trainer.ppo.mismatch import measures_reference
from trainer.ppo.roles import declaring_class, scorings_of
from verl_like.placement.roles import expand_roles
from verl_like.terminal import draw_table
from workers.columns import reads_of, rm_column
from workers.config import model_rewards
from workers.config.conditions import has_teacher, teacher_is_alone
from workers.losses.registry import facts_of, get_policy_loss

REUSE_NOTICE = (
    "notice: old log-probs are not computed in a pass of their own: an update is one optimizer "
    "step on samples of the current policy, so its own forward pass gives them"
)

STEP_1_NOTICE = (
    "notice: step 1 alone computes them, to say how far the int8 reference is off before the actor "
    "has moved"
)

BYPASS_NOTICE = (
    "notice: old log-probs are the rollout's (bypass_mode): the actor does not compute them"
)


def old_log_probs_are_the_updates_own(config: PPOConfig) -> bool:
    """Whether samples of the current policy need no old log-probs before the update.

    True if the first forward pass of the update sees every row under the weights that made it, and
    nothing reads the old log-probs earlier: one mini-batch, one epoch, no KL in the reward, no
    teacher, no correction for the rollout, no bypass, no loss that chooses tokens by them. (Models
    train without dropout.)
    """
    actor = config.actor_rollout_ref.actor
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode or columns_of_correction(correction):
        return False
    if facts_of(get_policy_loss(actor.policy_loss.loss_mode)).choose_tokens is not None:
        return False
    if actor.ppo_epochs > 1 or actor.ppo_mini_batch_size != config.data.train_batch_size:
        return False
    if has_teacher(config):
        return False
    return not config.algorithm.use_kl_in_reward and "old_log_probs" not in columns_read(
        config.algorithm.adv_estimator
    )


STAGES = frozenset(
    "step make_samples generate greedy_scores roll_out ask_rollout with_rewards launch_rewards "
    "balance number_rows score read_samples estimate update sync send_weights call needed "
    "policy_is_current".split()
)
"""The methods of a trainer that make the calls of a step."""


@dataclass(frozen=True)
class Node:
    """One call of a step: where it runs, what it reads and writes."""

    stage: str
    name: str
    pool: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def own_stages(trainer_cls: type, base: type) -> list[str]:
    """`Class.method` of every part of the step that `trainer_cls` does not have from `base`."""
    found = []
    for name in sorted(STAGES):
        method = getattr(trainer_cls, name)
        if method is not getattr(base, name):
            found.append(method.__qualname__)
    return found


@dataclass
class Graph:
    """The nodes of a step, put together stage by stage."""

    config: PPOConfig
    nodes: list[Node] = field(default_factory=list)

    def on_role(self, stage: str, role: str, method: str, *writes: str) -> None:
        """Add a call on a role's workers, where the run has this role; or on one of its likes."""
        mapping = expand_roles(self.config.role_mapping)
        pools = [pool for each, pool in mapping.items() if self.config.kind_of(each) == role]
        if pools:
            reads = reads_of(declaring_class(self.config, role), method) or ("responses",)
            pool = ", ".join(dict.fromkeys(pools))
            self.nodes.append(Node(stage, f"{role}.{method}", pool, reads, writes))

    def on_driver(self, stage: str, name: str, reads: Iterable[str], *writes: str) -> None:
        """Add what the driver computes itself."""
        self.nodes.append(Node(stage, name, "driver", tuple(reads), writes))


def step_nodes(config: PPOConfig) -> list[Node]:
    """The calls of a step in the order in which the driver launches them."""
    graph = Graph(config)
    _add_generation(graph)
    _add_scoring(graph)
    _add_advantages(graph)
    _add_update(graph)
    graph.on_driver("update_weights", "sync_weights", ("actor weights",), "rollout weights")
    if config.actor_rollout_ref.ref.update_every is not None:
        graph.on_driver("update_weights", "update_reference", ("actor weights",), "ref weights")
    return graph.nodes


def _add_generation(graph: Graph) -> None:
    graph.on_driver("gen", "prompts", (), "input_ids", "uid")
    made = "input_ids", "responses", "response_mask", "rollout_log_probs"
    graph.on_role("gen", "rollout", "generate_sequences", *made)
    algorithm = graph.config.algorithm
    if compares_with_greedy(algorithm.adv_estimator):
        graph.on_driver("gen", "greedy_scores", ("responses",), "reward_baselines")
    _add_readings(graph, "gen")
    if algorithm.filter_groups.enable:
        _add_rewards(graph, "gen")


def _add_scoring(graph: Graph) -> None:
    if not graph.config.algorithm.filter_groups.enable:
        _add_rewards(graph, "score")
    config = graph.config
    is_in_step_1 = measures_reference(config, step=1)
    bypasses = config.algorithm.rollout_correction.bypass_mode
    if not bypasses and (is_in_step_1 or not old_log_probs_are_the_updates_own(config)):
        graph.on_role("score", "actor", "compute_log_prob", "old_log_probs")
    _add_readings(graph, "score")


def _add_readings(graph: Graph, stage: str) -> None:
    """What other roles say of the samples, of those that do it in this stage."""
    for scoring in scorings_of(graph.config):
        if scoring.stage == stage:
            graph.on_role(stage, scoring.role, scoring.method, *scoring.writes)


def _add_rewards(graph: Graph, stage: str) -> None:
    reads = ["responses"]
    for role in model_rewards(graph.config):
        column = rm_column(role)
        by_makers = graph.config.reads_in(role) == "gen"
        graph.on_role("gen" if by_makers else stage, role, "compute_rm_score", column)
        reads.append(column)
    graph.on_driver(stage, "rewards", reads, "token_level_scores")


def _add_advantages(graph: Graph) -> None:
    algorithm = graph.config.algorithm
    reads = ["token_level_scores"]
    if algorithm.use_kl_in_reward:
        reads += ["old_log_probs", "ref_log_prob"]
    graph.on_driver("adv", "token rewards", reads, "token_level_rewards")
    estimator = algorithm.adv_estimator
    teacher_reads = ["old_log_probs", "teacher_log_prob"]
    if not teacher_is_alone(graph.config):
        graph.on_driver("adv", estimator, columns_read(estimator), "advantages", "returns")
        teacher_reads += ["advantages", "returns"]
    if has_teacher(graph.config):
        graph.on_driver("adv", "distillation", teacher_reads, "advantages", "returns")


def _add_update(graph: Graph) -> None:
    corrected = columns_of_correction(graph.config.algorithm.rollout_correction)
    if corrected:
        reads = ("old_log_probs", "rollout_log_probs")
        graph.on_driver("update", "rollout correction", reads, *corrected)
    graph.on_role("update", "critic", "update_critic", "critic weights")
    graph.on_role("update", "actor", "update_actor", "actor weights")


def edges(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Name of each node -> names of those whose columns it reads: each column's latest writer."""
    writer: dict[str, str] = {}
    after: dict[str, list[str]] = {}
    for node in nodes:
        after[node.name] = list(
            dict.fromkeys(writer[column] for column in node.reads if column in writer)
        )
        writer |= dict.fromkeys(node.writes, node.name)
    return after


def side_by_side(nodes: Sequence[Node], after: dict[str, list[str]]) -> list[tuple[Node, Node]]:
    """Pairs of one stage of which neither waits for the other: they overlap on different pools."""
    waits: dict[str, set[str]] = {}
    for node in nodes:
        waits[node.name] = {far for near in after[node.name] for far in (near, *waits[near])}

    pairs = []
    for first, second in combinations(nodes, 2):
        if first.stage == second.stage and first.name not in waits[second.name]:
            pairs.append((first, second))
    return pairs


def _groups(pairs: Sequence[tuple[Node, Node]]) -> list[list[Node]]:
    """The nodes of these pairs, those together that a chain of pairs connects."""
    groups: list[list[Node]] = []
    for pair in pairs:
        touched = [group for group in groups if any(node in group for node in pair)]
        merged = [node for group in touched for node in group]
        merged += [node for node in pair if node not in merged]
        groups = [group for group in groups if group not in touched] + [merged]
    return groups


def _in_words(group: Sequence[Node]) -> str:
    """`a, then b ‖ c`: the pools beside each other, each with its calls one after the other."""
    pools = dict.fromkeys(node.pool for node in group)
    calls = ([node.name for node in group if node.pool == pool] for pool in pools)
    return " ‖ ".join(", then ".join(of_pool) for of_pool in calls)


def describe(
    config: PPOConfig,
    max_columns: int | None = None,
    own: Sequence[str] = (),
) -> str:
    """The graph in words: what each call waits for, which overlap, which take turns.

    The table is no wider than `max_columns`. `own` are the stages that a subclass overrides.
    Bookkeeping columns such as the attention mask come with the tokens and are not drawn.
    """
    nodes = step_nodes(config)
    after = edges(nodes)
    rows = [("stage", "call", "pool", "after")]
    for node in nodes:
        rows.append((node.stage, node.name, node.pool, ", ".join(after[node.name]) or "-"))
    lines = draw_table(rows, max_columns, num_titles=2)

    pairs = side_by_side(nodes, after)
    overlapping = _groups([pair for pair in pairs if pair[0].pool != pair[1].pool])
    in_turns = _groups([pair for pair in pairs if pair[0].pool == pair[1].pool])
    for title, groups in (("at the same time", overlapping), ("in turns, on one pool", in_turns)):
        shown = [f"  {group[0].stage}: {_in_words(group)}" for group in groups]
        lines += [f"{title}:", *shown] if shown else [f"{title}: nothing"]

    if old_log_probs_are_the_updates_own(config):
        lines.append(REUSE_NOTICE)
        if measures_reference(config, step=1):
            lines.append(STEP_1_NOTICE)
    if config.algorithm.rollout_correction.bypass_mode:
        lines.append(BYPASS_NOTICE)
    if own:
        lines.append(f"notice: the graph is PPO's; {', '.join(own)} may call more, or other roles")
    return "\n".join(lines)
