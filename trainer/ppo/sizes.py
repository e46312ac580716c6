"""Number of prompts, samples and tokens in each call of a step: total, per rank, per micro-batch.

`verl-like check --full` prints the table. Token counts are upper bounds: they assume prompts and
responses of full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.ppo.config import PPOConfig
from trainer.ppo.roles import declared_models
from verl_like.placement.pools import expand_roles
from verl_like.terminal import draw_table
from workers.config import model_rewards, tokens_per_pass
from workers.parallel.sharding import ParallelDims, dims_of
from workers.training.role_model_spec import RoleModelSpec

if TYPE_CHECKING:
    from trainer.stubs import CallNode


@dataclass(frozen=True)
class CallSize:
    """The samples of a call or, if it trains, of an optimizer step, and of its passes on a rank.

    A pass has `pass_samples`, or `pass_tokens` if `pass_samples` is None.
    """

    role: str
    method: str
    samples: int
    pass_samples: int | None
    pass_tokens: int

    @property
    def trains(self) -> bool:
        """True for a call that updates a model."""
        return self.method.startswith("update_")


def call_sizes(config: PPOConfig, nodes: Sequence[CallNode]) -> list[CallSize]:
    """Return the sizes of the calls that have a batch, of rollouts and of roles with a model."""
    models = declared_models(config)
    return [
        call_size(config, models.get(role), role, node.method, node.samples)
        for node in nodes
        for role in node.roles
        if node.samples and (role in models or config.kind_of(role) == "rollout")
    ]


def call_size(
    config: PPOConfig, model: RoleModelSpec | None, role: str, method: str, samples: int
) -> CallSize:
    """Return the size of a call of a role with this number of samples; a rollout has no model."""
    if model is None:
        rollout = config.of_role(role).actor_rollout_ref.rollout
        return CallSize(role, method, samples, rollout.max_num_seqs, 0)
    actor, reward = config.actor_rollout_ref.actor, model_rewards(config).get(config.kind_of(role))
    rows = model.rows if reward is None else actor.ppo_micro_batch_size_per_gpu
    if method.startswith("update_"):
        rows, samples = model.trained_rows, model.mini_batch or samples
    rows_of_reward = None if reward is None else reward.micro_batch_size_per_gpu
    at_once = rows_of_reward or (None if actor.use_dynamic_bsz else rows)
    return CallSize(role, method, samples, at_once, model.tokens or tokens_per_pass(config))


def batch_line(config: PPOConfig) -> str:
    """Return the sizes of a step in one line."""
    data, num_samples = config.data, config.actor_rollout_ref.rollout.n
    tokens = data.max_prompt_length + data.max_response_length
    return (
        f"Step: {data.train_batch_size:,} prompts x {num_samples} "
        f"sample{'s' if num_samples > 1 else ''}, up to {tokens:,} tokens each; mini-batches of "
        f"{config.actor_rollout_ref.actor.ppo_mini_batch_size:,} prompts"
    )


HEAD = ("", "ranks", "prompts", "samples", "per rank", "per pass", "tokens per pass")
BY_TOKENS = "by tokens"
"""The cell of the samples per pass if the tokens limit a pass."""


def batch_table(config: PPOConfig, nodes: Sequence[CallNode]) -> str:
    """Return the table of prompts, samples and tokens of these calls of a step."""
    width = config.data.max_prompt_length + config.data.max_response_length
    num_samples = config.actor_rollout_ref.rollout.n
    pools, models = expand_roles(config.role_mapping), declared_models(config)
    lines: list[tuple[str, ...]] = [HEAD]
    for size in call_sizes(config, nodes):
        ranks, model = sum(config.resource_pool_spec[pools[size.role]]), models.get(size.role)
        dims = ParallelDims(shard=ranks) if model is None else dims_of(ranks, model.sharding)
        on_rank = -(-size.samples // dims.data_size)
        micro = (BY_TOKENS, f"{min(size.pass_tokens, -(-on_rank * width // dims.sp)):,}")
        if size.pass_samples is not None:
            at_once = min(size.pass_samples, on_rank)
            micro = (f"{at_once:,}", f"{-(-at_once * width // dims.sp):,}")
        cells = (ranks, size.samples // num_samples, size.samples, on_rank)
        lines.append((f"{size.role}.{size.method}", *(f"{cell:,}" for cell in cells), *micro))
    title = (
        f"{num_samples} sample{'s' if num_samples > 1 else ''} per prompt, each up to {width:,} "
        "tokens (prompt and response); updates: a mini-batch"
    )
    return "\n".join([title, *draw_table(lines, flush_right=True, zero=BY_TOKENS)])
