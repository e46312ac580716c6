"""Number of prompts, samples and tokens in each call of a step: total, per rank, per micro-batch.

`verl-like check --full` prints the table. Token counts are upper bounds: they assume prompts and
responses of full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.ppo.config import PPOConfig
from verl_like.placement.roles import expand_roles
from verl_like.terminal import draw_table
from workers.config import model_rewards, tokens_per_pass
from workers.parallel.sharding import ParallelDims, dims_of

if TYPE_CHECKING:
    from trainer.ppo.dataflow import CallNode

CRITIC_COPY = "critic_copy"
"""Role of a copy of the critic with which a generator computes the values of its samples."""


@dataclass(frozen=True)
class SizeRow:
    """The passes of a role without or with gradients.

    A rank processes `micro_samples` per pass, or `micro_tokens` if `micro_samples` is None.
    """

    role: str
    prompts: int
    micro_samples: int | None
    micro_tokens: int = 0
    trains: bool = False


def rows_of(config: PPOConfig, tokens_at_once: int | None = None) -> list[SizeRow]:
    """Return the passes of the roles of this run.

    `tokens_at_once` is the number of tokens of a pass with dynamic batch sizes whose role sets no
    number (default: the actor's number).
    """
    from trainer.ppo.roles import models_of, scorings_of  # imports torch, which a recipe must not

    actor, critic = config.actor_rollout_ref.actor, config.critic
    mini = actor.ppo_mini_batch_size

    def cut(samples: int | None, tokens: int | None = None) -> tuple[int | None, int]:
        tokens = tokens or tokens_at_once or tokens_per_pass(config)
        return None if actor.use_dynamic_bsz else samples, tokens

    of_actor = cut(actor.ppo_micro_batch_size_per_gpu)
    of_critic = cut(critic.ppo_micro_batch_size_per_gpu, critic.ppo_max_token_len_per_gpu)
    trained = {
        "actor": SizeRow("actor", mini, *of_actor, True),
        "critic": SizeRow("critic", critic.ppo_mini_batch_size or mini, *of_critic, True),
    }
    rewards, models = model_rewards(config), models_of(config)
    scoring = {scoring.role for scoring in scorings_of(config)}
    rows = []
    for role in expand_roles(config.role_mapping):
        kind, prompts = config.kind_of(role), config.prompts_per_call(role)
        if kind == "rollout":
            at_once = config.of_role(role).actor_rollout_ref.rollout.max_num_seqs
            rows.append(SizeRow(role, prompts, at_once))
        elif kind in rewards:
            samples = rewards[kind].micro_batch_size_per_gpu
            rows.append(SizeRow(role, prompts, *((samples, 0) if samples else of_actor)))
        elif kind in scoring:
            rows.append(SizeRow(role, prompts, *cut(models[role].rows, models[role].tokens)))
        rows += [trained[role]] if role in trained else []
    return rows


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


def batch_table(config: PPOConfig, nodes: Sequence[CallNode], heading: str = "Batch sizes") -> str:
    """Return the table of prompts, samples and tokens of these calls of a step."""
    from trainer.ppo.roles import models_of  # imports torch, which a recipe must not

    width = config.data.max_prompt_length + config.data.max_response_length
    num_samples = config.actor_rollout_ref.rollout.n
    pools, models = expand_roles(config.role_mapping), models_of(config)
    rows = {(row.role, row.trains): row for row in rows_of(config)}
    lines: list[tuple[str, ...]] = [HEAD]
    for role, node in [(role, call) for call in nodes for role in call.roles if call.reads]:
        method = node.name.rpartition(".")[2]
        row = rows.get((role, method.startswith("update_")))
        if row is None:
            continue
        ranks = sum(config.resource_pool_spec[pools[role]])
        samples = row.prompts * num_samples
        model = models.get(role)
        dims = ParallelDims(shard=ranks) if model is None else dims_of(ranks, model.sharding)
        on_rank = -(-samples // dims.data_size)
        tokens = -(-on_rank * width // dims.sp)
        at_once = min(row.micro_samples, on_rank) if row.micro_samples is not None else None
        cells = (ranks, row.prompts, samples, on_rank)
        micro = (
            (BY_TOKENS, f"{min(row.micro_tokens, tokens):,}")
            if at_once is None
            else (f"{at_once:,}", f"{-(-at_once * width // dims.sp):,}")
        )
        lines.append((f"{role}.{method}", *(f"{cell:,}" for cell in cells), *micro))
    samples_each = f"{num_samples} sample{'s' if num_samples > 1 else ''} per prompt"
    title = (
        f"{samples_each}, each up to {width:,} tokens (prompt and response); updates: a mini-batch"
    )
    title = f"{heading} ({title})" if heading else title
    return "\n".join([title, *draw_table(lines, flush_right=True, zero=BY_TOKENS)])
