"""Number of prompts, samples and tokens in each part of a step: total, per rank, per micro-batch.

`verl-like check --full` prints the table. Token counts are upper bounds: they assume prompts and
responses of full length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from trainer.ppo.config import PPOConfig
from verl_like.placement.roles import expand_roles
from verl_like.terminal import draw_table
from workers.config import model_rewards, tokens_per_pass
from workers.parallel.dims import ParallelDims
from workers.parallel.sharding import dims_of

CRITIC_COPY = "critic_copy"
"""Role of a copy of the critic with which a generator computes the values of its samples."""


@dataclass(frozen=True)
class SizeRow:
    """One part of a step.

    A rank processes `micro_samples` per pass, or `micro_tokens` if `micro_samples` is None.
    """

    part: str
    role: str
    prompts: int
    micro_samples: int | None
    micro_tokens: int = 0
    trains: bool = False


def rows_of(config: PPOConfig, tokens_at_once: int | None = None) -> list[SizeRow]:
    """Return the parts of a step for the roles of this run.

    `tokens_at_once` is the number of tokens of a pass with dynamic batch sizes whose role sets no
    number (default: the actor's number).
    """
    from trainer.ppo.roles import models_of, scorings_of  # imports torch, which a recipe must not

    actor, critic = config.actor_rollout_ref.actor, config.critic
    mini = actor.ppo_mini_batch_size

    def cut(samples: int | None, tokens: int | None = None) -> tuple[int | None, int]:
        tokens = tokens or tokens_at_once or tokens_per_pass(config)
        return None if actor.use_dynamic_bsz else samples, tokens

    def reads(part: str, role: str, samples: int | None, tokens: int = 0) -> SizeRow:
        return SizeRow(part, role, config.prompts_per_call(role), samples, tokens)

    def num_sequences(role: str) -> int:
        return config.of_role(role).actor_rollout_ref.rollout.max_num_seqs

    of_actor = cut(actor.ppo_micro_batch_size_per_gpu)
    of_critic = cut(critic.ppo_micro_batch_size_per_gpu, critic.ppo_max_token_len_per_gpu)
    parts = [reads("generate", "rollout", num_sequences("rollout"))]
    for role, reward in model_rewards(config).items():
        micro_batch = reward.micro_batch_size_per_gpu
        parts.append(
            reads("reward", role, *(of_actor if micro_batch is None else (micro_batch, 0)))
        )
    models = models_of(config)
    for scoring in scorings_of(config):
        model = models[scoring.role]
        parts.append(reads(scoring.part, scoring.role, *cut(model.rows, model.tokens)))
    parts += [
        SizeRow(
            "critic mini-batch", "critic", critic.ppo_mini_batch_size or mini, *of_critic, True
        ),
        SizeRow("actor mini-batch", "actor", mini, *of_actor, True),
    ]

    roles = list(expand_roles(config.role_mapping))
    parts_of_run = [row for row in parts if row.role in roles]
    for row, role in product(parts, roles):
        if role != row.role and config.kind_of(role) == row.role:  # a further role of that kind
            samples = num_sequences(role) if row.role == "rollout" else row.micro_samples
            part = f"{row.part}, {role}"
            parts_of_run.append(replace(row, part=part, role=role, micro_samples=samples))
    return parts_of_run


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


def batch_table(config: PPOConfig, heading: str = "Batch sizes") -> str:
    """Return the table of prompts, samples and tokens per part.

    Old log-probs are left out if no step computes them by a separate pass.
    """
    # these import torch, which a recipe must not
    from trainer.ppo.roles import models_of, scorings_of
    from trainer.ppo.score import readings, update_computes_old_log_probs

    is_current = not getattr(config, "generates_while_training", False)
    in_update = is_current and update_computes_old_log_probs(config, step=1)
    passes = readings(config, in_update)
    left_out = {scoring.part for scoring in scorings_of(config) if scoring not in passes}
    width = config.data.max_prompt_length + config.data.max_response_length
    num_samples = config.actor_rollout_ref.rollout.n
    pools, models = expand_roles(config.role_mapping), models_of(config)
    lines: list[tuple[str, ...]] = [HEAD]
    for row in rows_of(config):
        if row.part in left_out:
            continue
        ranks = sum(config.resource_pool_spec[pools[row.role]])
        samples = row.prompts * num_samples
        model = models.get(row.role)
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
        lines.append((row.part, *(f"{cell:,}" for cell in cells), *micro))
    samples_each = f"{num_samples} sample{'s' if num_samples > 1 else ''} per prompt"
    title = f"{samples_each}, each up to {width:,} tokens (prompt and response)"
    title = f"{heading} ({title})" if heading else title
    return "\n".join([title, *draw_table(lines, flush_right=True, zero=BY_TOKENS)])
