"""The fourth stage: what critic and actor train on besides the filtered samples, and the entropy.

Filters of the samples are in `trainer.ppo.filters`. Tokens may also be chosen for the policy loss,
and PTX rows are trained on in the same update.

The losses `clip_cov` and `kl_cov` compare the tokens of a mini-batch with each other. The driver
has all tokens, so it chooses, and the workers read the column `chosen_tokens`. The choice therefore
depends neither on the number of ranks nor on the split into micro-batches.
"""

from __future__ import annotations

import logging
import math
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainer.data.files import row_limit
from trainer.data.loader import RowLoader
from trainer.ppo.config import PPOConfig
from trainer.ppo.filters import in_order_of_names
from verl_like.batch.protocol import DataProto
from verl_like.config_key import select_arguments
from workers.columns import read_columns, sampled_log_probs_column, write_columns
from workers.config import ActorConfig
from workers.losses.registry import get_policy_loss, traits_of

if TYPE_CHECKING:
    from trainer.data.lm_rows import LMRow

logger = logging.getLogger(__name__)
LARGEST_ERROR = 1.0
"""Distances of the entropy to its target are clipped to this many nats."""
ENTROPY_COEFF_LR = 0.1
"""Change of the log-coefficient per step and nat of distance."""
RANGE = 100.0
"""The coefficient stays within `actor.entropy_coeff` divided and multiplied by this factor."""


def add_chosen_tokens(batch: DataProto, config: PPOConfig, step: int) -> DataProto:
    """Add the column `chosen_tokens` to the batch if the policy loss reads it.

    Mini-batch k of K has the rows whose index is k modulo K.
    """
    policy, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    choose = traits_of(get_policy_loss(actor.policy_loss.loss_mode)).choose_tokens
    if choose is None:
        return batch

    bypasses = config.algorithm.rollout_correction.bypass_mode
    old_log_probs = sampled_log_probs_column(batch.columns) if bypasses else "old_log_probs"
    columns = read_columns(batch, old_log_probs, "advantages", "response_mask")
    arguments = select_arguments(choose, actor.policy_loss.args)
    chosen = torch.zeros(columns["response_mask"].shape, dtype=torch.bool)
    count = max(len(batch) // (actor.ppo_mini_batch_size * policy.rollout.n), 1)
    order = in_order_of_names(batch)
    for number in range(count):
        rows = order[order % count == number]
        seed = f"chosen_tokens {config.trainer.seed} {step} {number}"
        generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
        chosen[rows] = choose(
            *(column[rows] for column in columns.values()), generator, config=actor, **arguments
        )
    return write_columns(batch, chosen_tokens=chosen)


def make_ptx_loader(config: PPOConfig, tokenizer: Any) -> RowLoader[LMRow] | None:
    """Return the loader of `ptx.train_files`, or None if there are no such files."""
    if not config.ptx.train_files:
        return None
    from trainer.data.lm_rows import lm_batch, read_lm_rows

    rows = read_lm_rows(
        "ptx.train_files",
        config.ptx.train_files,
        tokenizer,
        longest_row(config),
        on_bad_row=config.data.on_bad_row,
        limit=row_limit(config),
    )
    make_batch = partial(lm_batch, pad_token_id=tokenizer.pad_token_id)
    return RowLoader(rows, config.trainer.seed, make_batch)


def longest_row(config: PPOConfig) -> int:
    """Return the maximum length of a PTX row; by default, that of a prompt with its response."""
    sample = config.data.max_prompt_length + config.data.max_response_length
    return config.ptx.max_length or sample


def rows_per_update(config: PPOConfig, num_prompts: int) -> int:
    """Return the number of PTX rows that one `update_actor` on `num_prompts` prompts trains on."""
    actor = config.actor_rollout_ref.actor
    num_steps = max(num_prompts // actor.ppo_mini_batch_size, 1) * actor.ppo_epochs
    return num_steps * (config.ptx.batch_size or actor.ppo_mini_batch_size)


class EntropyController:
    """The coefficient of the entropy bonus, which steers the entropy to a target.

    Its logarithm grows by 0.1 x (target - entropy), within limits: an entropy below the target
    increases the bonus (SAC, arXiv 1812.05905). Without a target the coefficient is constant.
    """

    def __init__(self, actor: ActorConfig) -> None:
        """Start at `actor.entropy_coeff`, which is above 0 if there is a target."""
        self.value = actor.entropy_coeff
        self.target = actor.target_entropy
        self.bounds = self.value / RANGE, self.value * RANGE

    def update(self, entropy: float) -> dict[str, float]:
        """Adapt to the mean entropy in an update; return the coefficient that the update used.

        An entropy of 0 means that there were no tokens or no update; it changes nothing.
        """
        if self.target is None:
            return {}
        metrics = {"actor/entropy_coeff": self.value}
        if math.isfinite(entropy) and entropy > 0:
            error = min(max(self.target - entropy, -LARGEST_ERROR), LARGEST_ERROR)
            low, high = self.bounds
            self.value = min(max(self.value * math.exp(ENTROPY_COEFF_LR * error), low), high)
        return metrics

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient for the actor and for checkpoints; empty if it is constant."""
        return {} if self.target is None else {"entropy_coeff": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's coefficient, if it has one."""
        if self.target is not None:
            self.value = state.get("entropy_coeff", self.value)
