"""The graph of the calls of a step: which calls depend on each other, and which can overlap.

Nothing here runs a step: `describe(config)` describes what `PPOTrainer.step` will do with that
configuration. The edges follow from the columns that calls read and write.
`tests/trainer/ppo/test_dataflow_recorded.py` compares the nodes with the calls of real runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from trainer.ppo import score
from trainer.ppo.compute_advantage import columns_read, compares_with_greedy
from trainer.ppo.config import PPOConfig
from trainer.ppo.filters import active_filters
from trainer.ppo.roles import declaring_class
from verl_like.placement.roles import expand_roles
from verl_like.terminal import draw_table
from workers.columns import reads_of, rm_column
from workers.config import model_rewards
from workers.config.conditions import has_only_teacher, has_teacher

REUSE_NOTICE = (
    "note: samples of the current weights need no separate pass for old log-probs: an update is "
    "one on-policy optimizer step, and its forward pass computes them"
)

STEP_1_NOTICE = (
    "note: step 1 still computes old log-probs, to measure the rounding error of the int8 "
    "reference before the actor changes"
)

BYPASS_NOTICE = (
    "note: bypass_mode uses the rollout's log-probs as old log-probs, so the actor computes none"
)

CONCURRENT_TITLE = "Concurrent"
INLINE = "Sequential, in the driver's process"
"""Title of calls in the driver's own thread (`RunConfig.is_inline`), which block later calls."""

STAGES = frozenset(
    "step sample sample_prompts generate balance score estimate update sync call".split()
)
"""The methods of a trainer that make the calls of a step."""


@dataclass(frozen=True)
class CallNode:
    """One call of a step: where it runs, and which columns it reads and writes."""

    stage: str
    name: str
    pool: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_inline: bool = False
    """True if the driver runs the call in its own thread before it launches the next one."""

    @property
    def place(self) -> str:
        """The pool or driver thread that runs one call at a time."""
        return INLINE if self.is_inline else self.pool


def overridden_stages(trainer_cls: type) -> list[str]:
    """Return `Class.method` for every method of the step that a user's class overrides."""
    base = next(cls for cls in trainer_cls.__mro__ if cls.__module__.startswith("trainer."))
    overridden = []
    for name in sorted(STAGES):
        method = getattr(trainer_cls, name)
        if method is not getattr(base, name):
            overridden.append(method.__qualname__)
    return overridden


@dataclass
class Graph:
    """The nodes of a step, added stage by stage."""

    config: PPOConfig
    nodes: list[CallNode] = field(default_factory=list)

    def on_role(self, stage: str, role: str, method: str, *writes: str) -> None:
        """Add a call on the role's workers, if the run has any.

        If the run has several generators, one node stands for the roles of all of them.
        """
        mapping = expand_roles(self.config.role_mapping)
        pools = [pool for name, pool in mapping.items() if self.config.kind_of(name) == role]
        if pools:
            reads = reads_of(declaring_class(self.config, role), method) or ("responses",)
            sizes = {pool: sum(self.config.resource_pool_spec[pool]) for pool in pools}
            is_inline = any(self.config.is_inline(pool, size) for pool, size in sizes.items())
            node = CallNode(stage, f"{role}.{method}", ", ".join(sizes), reads, writes, is_inline)
            self.nodes.append(node)

    def on_driver(self, stage: str, name: str, reads: Iterable[str], *writes: str) -> None:
        """Add a computation of the driver."""
        self.nodes.append(CallNode(stage, name, "driver", tuple(reads), writes))

    def add_readings(self, stage: str) -> None:
        """Add the calls of this stage that score samples, except rewards."""
        in_update = score.update_computes_old_log_probs(self.config, step=1)
        for scoring in score.readings(self.config, in_update):
            if scoring.stage == stage:
                self.on_role(stage, scoring.role, scoring.method, *scoring.writes)


def step_nodes(config: PPOConfig) -> list[CallNode]:
    """Return the calls of a step in the order in which the driver launches them."""
    graph = Graph(config)
    algorithm = config.algorithm
    graph.on_driver("gen", "prompts", (), "input_ids", "uid")
    columns = "input_ids", "responses", "response_mask", "rollout_log_probs"
    graph.on_role("gen", "rollout", "generate_sequences", *columns)
    if compares_with_greedy(algorithm.adv_estimator):
        graph.on_driver("gen", "greedy_scores", ("responses",), "reward_baselines")
    graph.add_readings("gen")

    reads, stage = ["responses"], "gen" if algorithm.filter_groups.enable else "score"
    for role in model_rewards(config):
        by_generators, column = config.reads_in(role) == "gen", rm_column(role)
        graph.on_role("gen" if by_generators else stage, role, "compute_rm_score", column)
        reads.append(column)
    graph.on_driver(stage, "rewards", reads, "token_level_scores")
    graph.add_readings("score")
    of_kl = ("old_log_probs", "ref_log_prob") if algorithm.use_kl_in_reward else ()
    graph.on_driver("adv", "token rewards", ("token_level_scores", *of_kl), "token_level_rewards")
    estimated = () if has_only_teacher(config) else ("advantages", "returns")
    if estimated:
        estimator = algorithm.adv_estimator
        graph.on_driver("adv", estimator, columns_read(estimator), *estimated)
    if has_teacher(config):
        teacher_reads = ("old_log_probs", "teacher_log_prob", *estimated)
        graph.on_driver("adv", "distillation", teacher_reads, "advantages", "returns")

    for name, chosen in active_filters(config).items():
        if written := chosen.writes(config):
            graph.on_driver("update", name, chosen.reads, *written)
    graph.on_role("update", "critic", "update_critic", "critic weights")
    graph.on_role("update", "actor", "update_actor", "actor weights")
    graph.on_driver("update_weights", "sync_weights", ("actor weights",), "rollout weights")
    has_reference = "ref" in expand_roles(config.role_mapping)
    if has_reference and config.actor_rollout_ref.ref.update_every is not None:
        graph.on_driver("update_weights", "update_reference", ("actor weights",), "ref weights")
    return graph.nodes


def edges(nodes: Sequence[CallNode]) -> dict[str, list[str]]:
    """Map the name of each node to the latest writers of the columns that it reads."""
    writer: dict[str, str] = {}
    after: dict[str, list[str]] = {}
    for node in nodes:
        after[node.name] = list(
            dict.fromkeys(writer[column] for column in node.reads if column in writer)
        )
        writer |= dict.fromkeys(node.writes, node.name)
    return after


def all_waits(nodes: Sequence[CallNode], after: dict[str, list[str]]) -> dict[str, set[str]]:
    """Map the name of each node to all nodes that must end before it begins."""
    waits: dict[str, set[str]] = {}
    for node in nodes:
        waits[node.name] = {far for near in after[node.name] for far in (near, *waits[near])}
    return waits


def side_by_side(
    nodes: Sequence[CallNode], after: dict[str, list[str]]
) -> list[tuple[CallNode, CallNode]]:
    """Return the pairs of nodes of a stage that do not depend on each other."""
    waits = all_waits(nodes, after)
    pairs = []
    for first, second in combinations(nodes, 2):
        if first.pool == "driver" and first.name != "rewards":
            continue  # the driver computes it before it makes the next call
        if first.stage == second.stage and first.name not in waits[second.name]:
            pairs.append((first, second))
    return pairs


def _chains(group: Sequence[CallNode], after: dict[str, list[str]]) -> list[str]:
    """Describe the calls of every place in their order, as in `a, then b (after c)`.

    `c` is a call of the group at another place.
    """
    chains: dict[str, list[str]] = {}
    for node in group:
        before = [n.name for n in group if n.name in after[node.name] and n.place != node.place]
        waits = f" (after {', '.join(before)})" if before else ""
        chains.setdefault(node.place, []).append(f"{node.name}{waits}")
    return [", then ".join(chain) for chain in chains.values()]


def _independent(
    nodes: Sequence[CallNode], after: dict[str, list[str]]
) -> dict[str, dict[str, list[str]]]:
    """Map each title to stage -> chains of the calls that are independent of another pool's."""
    members: dict[str, set[CallNode]] = {CONCURRENT_TITLE: set(), INLINE: set()}
    for first, second in side_by_side(nodes, after):
        if first.pool != second.pool:
            members[INLINE if first.is_inline else CONCURRENT_TITLE] |= {first, second}
    independent: dict[str, dict[str, list[str]]] = {}
    for title, there in members.items():
        groups: dict[str, list[CallNode]] = {}
        for node in nodes:
            if node in there:
                groups.setdefault(node.stage, []).append(node)
        independent[title] = {stage: _chains(group, after) for stage, group in groups.items()}
    return independent


def overlaps(config: PPOConfig) -> str:
    """Describe the calls of a step that run at the same time, and the stages that run inline."""
    nodes = step_nodes(config)
    stages = _independent(nodes, edges(nodes))
    concurrent = stages[CONCURRENT_TITLE].items()
    lines = []
    for stage, chains in concurrent:
        bound = [f"({chain})" if ", then " in chain else chain for chain in chains]
        lines.append(f"{CONCURRENT_TITLE} in {stage}: {' ‖ '.join(bound)}")
    if stages[INLINE]:
        lines.append(f"{INLINE}: {', '.join(stages[INLINE])}")
    return "\n".join(lines)


def describe(config: PPOConfig, overridden: Sequence[str] = ()) -> str:
    """Describe the graph: what each call waits for, and which calls overlap.

    The table leaves out waits that follow from others: a call also waits for everything that the
    calls in its row wait for. `overridden` lists the methods that a subclass overrides.
    Bookkeeping columns that come with the tokens, such as the attention mask, are left out.
    """
    nodes = step_nodes(config)
    after = edges(nodes)
    waits = all_waits(nodes, after)
    rows = [("stage", "call", "pool", "waits for")]
    for node in nodes:
        before = after[node.name]
        last = [name for name in before if not any(name in waits[other] for other in before)]
        rows.append((node.stage, node.name, node.pool, ", ".join(last) or "-"))
    lines = draw_table(rows, num_titles=2)

    for title, stages in _independent(nodes, after).items():
        if stages:
            lines.append(f"{title}:")
        between = ", then " if title == INLINE else "\n    ‖ "
        lines += [f"  {stage}: {between.join(chains)}" for stage, chains in stages.items()]

    if score.update_can_compute_old_log_probs(config):
        lines.append(REUSE_NOTICE)
        if score.measures_reference(config, step=1):
            lines.append(STEP_1_NOTICE)
    if config.algorithm.rollout_correction.bypass_mode:
        lines.append(BYPASS_NOTICE)
    if overridden:
        names = ", ".join(overridden)
        lines.append(f"note: the graph shows the calls of PPO; {names} may make other calls")
    return "\n".join(lines)
